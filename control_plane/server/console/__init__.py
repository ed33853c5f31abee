"""The console: read-only web pages for people, under /console/ of the control plane.

The modules, from the bottom up:

    access       who may open the console, and the headers that keep other web sites away from it
    templates    fills in the pages; everything is escaped
    sidecars     the list of sidecars: filter, search, pages
    timeline     samples of the last hour, and the charts that show them
    playground   one request through the filter, in a process of its own that can be stopped
    explain_one  that process
    pages        the routes
"""
