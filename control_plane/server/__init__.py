"""The control plane: discovery for sidecars, the admission webhook, and the status of the fleet.

process            the listeners, their limits and their end
app                the routes, and the task that watches the files
fast_path          the paths with most requests, in front of the routes
xds                policies and a resource key -> a discovery response
discovery_request  the body of a discovery request -> its typed form
fleet              the sidecars that poll this replica, and the status of each
injections         what the webhook did to pods: counts, a log line each, and the most recent ones
events             Events about injections, on the objects that own the pods
metrics, policy_file, certificates, services, settings, bounded_cache
"""
