"""`python -m dali_echo` is `dali-echo`."""

from dali_echo.cli import app

app(prog_name="dali-echo")
