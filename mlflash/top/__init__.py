"""The command ``mlflash top``: pulses of the ranks → a look → what has come by so far → a page of the terminal."""
