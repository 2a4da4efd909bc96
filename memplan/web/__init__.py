"""The planner as a page of static files: `make web` builds it, and memplan itself answers in the browser.

`page` is what the page asks of memplan; `pack` writes what the page is built from. The rest is the page:
`index.html`, `src/` and what builds them.
"""
