from pantheraml.cli.schema import run
def add(commands):
    return commands.add_parser("demo")
