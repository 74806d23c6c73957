"""Training as a service: the routes of clients that write their own training loop, Tinker's and xorl's.

What they send and expect is in `bombus_gateway.operations_wire`; here it is put on the log, and read from it.
"""
