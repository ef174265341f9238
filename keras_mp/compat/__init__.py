"""How other systems, and older versions, spell what is here."""
