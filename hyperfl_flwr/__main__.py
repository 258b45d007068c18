"""`hyperfl`, or `python -m hyperfl_flwr`: the command line, and how it ends."""

import sys

from hyperfl_flwr.core.errors import HyperFLError
from hyperfl_flwr.core.packages.package_guard import ALL, refuse_foreign_packages
from hyperfl_flwr.core.packages.quick_imports import quick_imports


def main() -> None:
    """Run the command line; a problem that the user can act on ends it with one message and its exit code."""
    try:
        refuse_foreign_packages(ALL)
        with quick_imports():
            from hyperfl_flwr.cli.main import cli  # only now, since it imports the packages that were checked

        cli()
    except HyperFLError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    except OSError as error:  # whatever file it is, its owner can do something about it
        if error.filename is None:
            raise
        sys.stderr.write(f"error: {error.filename} cannot be used ({error.strerror}); correct the path or its owner\n")
        sys.exit(HyperFLError.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
