from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Backlog(_message.Message):
    __slots__ = ("uid", "reference", "reply_to", "module", "ttl", "destination", "expires")
    UID_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    REPLY_TO_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    uid: str
    reference: str
    reply_to: str
    module: str
    ttl: int
    destination: int
    expires: int
    def __init__(self, uid: _Optional[str] = ..., reference: _Optional[str] = ..., reply_to: _Optional[str] = ..., module: _Optional[str] = ..., ttl: _Optional[int] = ..., destination: _Optional[int] = ..., expires: _Optional[int] = ...) -> None: ...
