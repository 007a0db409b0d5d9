"""The protobuf schemas and the code made from them; only :mod:`dmsg.rmb.core.wire` imports it."""
