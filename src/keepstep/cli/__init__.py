"""The command ``keepstep``: arguments in, tables or JSON out, an exit status that says what kind of fault there is."""
