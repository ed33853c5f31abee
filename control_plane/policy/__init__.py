"""The policy: what to do with a priority.

load      reads a policy file and validates it, once
model     what a policy can say; past it, nothing is checked again
restart   what of a policy a running sidecar cannot be sent
trust     the part of it that says who may name a priority
claims    the part of that about tokens
fields    the types of its values
messages  describes what pydantic found wrong, for policies, pods and discovery requests
"""
