"""Training as a service: the routes for clients that write their own training loop, such as Tinker's and xorl's.

`bombus_gateway.operations_wire` reads their requests and writes their answers; this package puts operations on the log
and reads results from it.
"""
