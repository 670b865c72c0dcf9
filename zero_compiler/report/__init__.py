"""Reports: a plan as text, as JSON, as a timeline and as a picture."""
