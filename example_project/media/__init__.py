"""A media manager: durable application events, each delivered in the order it happened, some of them at once."""
