"""Names of `slime.utils.misc`."""

from bombus.slime.functions import load_function as load_function
