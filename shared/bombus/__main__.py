import sys

from bombus.cli import main

sys.exit(main())
