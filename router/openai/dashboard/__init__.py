"""The dashboard: a page that shows what `router.live` tells."""
