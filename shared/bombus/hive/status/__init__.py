"""The status of a hive as data and as text. Pure, like the fold from which it is derived."""
