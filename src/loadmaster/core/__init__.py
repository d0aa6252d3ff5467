"""The nouns: what crosses every package border. numpy and msgspec only."""
