"""The planner's page: its HTML (page.py), what it does (planner.js), how it looks (planner.css).

Where there is no server, worker.js runs the package in the browser; tools/planner_site.py puts that together.
"""
