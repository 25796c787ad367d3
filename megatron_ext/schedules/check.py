# STAND-IN BY THE LEAD: SCHED overwrites this file.
def check(program):
    pass
