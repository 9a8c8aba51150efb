"""``manage.py demo``: the three systems at work while a dispatcher is killed, and the proof that the books balance."""
