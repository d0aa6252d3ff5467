"""Plans and timelines for people: tables, traces."""
