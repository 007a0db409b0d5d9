class EntryRegistrar:
    def __init__(self,*a,**k): raise AssertionError
