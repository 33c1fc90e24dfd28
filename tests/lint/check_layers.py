"""Holds the C++ sources to the architecture. usage: check_layers.py [REPOSITORY]

The rules are those that no compiler knows: which layer may include which, where the environment is
read, what must not occur in common/, and how long files and functions may be. Prints one line a
violation, "file:line: what is wrong; what to do", and exits with 1 if there is any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# Layer: the layers that it may include beside itself.
LAYERS: dict[str, frozenset[str]] = {"base": frozenset()}
for _name in ("device", "codec", "transport"):
    LAYERS[_name] = frozenset({"base"})
LAYERS["collective"] = frozenset(LAYERS)
LAYERS["runtime"] = frozenset(LAYERS)
LAYERS["c_api"] = frozenset(LAYERS)

BINDINGS = ("torch", "tensorflow")
BORDER = "common/c_api.h"
SUFFIXES = (".h", ".cc", ".cu", ".cuh")
ENVIRONMENT = "common/base/config.cc"
PACKAGE_FREE = (*BINDINGS, *(f"tests/{name}" for name in BINDINGS))
# Headers of PyTorch; one of the same name in torch/ would be found instead.
PYTORCH_HEADERS = ("extension.h", "library.h", "torch.h")

HEADER_LINES, SOURCE_LINES, FUNCTION_LINES = 200, 500, 80
# Files that may be longer, and why.
LONG_FILES = {
    "common/c_api.h": "the whole border is one file, most of it contract",
    "common/collective/reduce_kernels_inl.h": "kernels, compiled once for each instruction set",
}

_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
_FRAMEWORK = re.compile(r"^(torch|ATen|c10|tensorflow|tsl|xla)/|^(Python|pybind11/.*)\.h$")
_CUDA = re.compile(r"^(cuda|nccl|cub/|thrust/|driver_types)")
_GETENV = re.compile(r"\b(?:secure_)?getenv\b")
_SLEEP = re.compile(r"\b(?:sleep_for|sleep_until|usleep|nanosleep)\b")
_NOT_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"'
    r'|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'',
    re.S,
)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.M)
# What opens a block of declarations, given the text since the last statement.
_SCOPE = re.compile(
    r"(?:(?:public|protected|private)\s*:\s*)*"
    r"(?:extern$|(?:template\b.*>\s*)?(?:inline\s+|typedef\s+)?"
    r"(?:namespace|class|struct|union|enum)\b)",
    re.S,
)


@dataclass(frozen=True)
class Violation:
    """One broken rule; prints as compilers print."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def layer_of(path: str) -> str:
    """The folder below common/; the files directly in it belong to the border."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else "c_api"


@dataclass(frozen=True)
class Source:
    """One C++ file."""

    path: str  # from the repository's root
    text: str

    @property
    def top(self) -> str:
        return self.path.partition("/")[0]

    @property
    def layer(self) -> str:
        """The binding's name, or the layer of a file of common/."""
        return self.top if self.top in BINDINGS else layer_of(self.path)

    @cached_property
    def code(self) -> str:
        """The text with comments and literals blanked out; lines keep their numbers."""
        return _NOT_CODE.sub(_blank, self.text)

    def violation(self, line: int, text: str) -> Violation:
        return Violation(self.path, line, text)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def sources(root: Path) -> Iterator[Source]:
    for top in ("common", *BINDINGS):
        for file in sorted((root / top).rglob("*")):
            if file.suffix in SUFFIXES:
                yield Source(file.relative_to(root).as_posix(), file.read_text())


# ---- Rules --------------------------------------------------------------------------------------


def check_includes(source: Source) -> Iterator[Violation]:
    if source.top == "common" and source.layer not in LAYERS:
        known = ", ".join(LAYERS)
        yield source.violation(1, f"'{source.layer}' is no layer; known are {known}")
        return
    for number, line in enumerate(source.text.splitlines(), 1):
        match = _INCLUDE.match(line)
        if match is not None:
            text = _wrong_include(source, *match.groups())
            if text is not None:
                yield source.violation(number, text)


def _wrong_include(source: Source, bracket: str, name: str) -> str | None:
    top = name.partition("/")[0]
    if source.top in BINDINGS:
        if top == "common" and name != BORDER:
            return f"'{source.layer}' may not include '{name}'; {BORDER} is the whole border"
        if top not in ("common", source.top) and bracket == '"':
            return f"write '{name}' from the repository's root, so that its layer can be seen"
        return None
    if top == "common":
        allowed = LAYERS[source.layer] | {source.layer}
        if layer_of(name) not in allowed:
            may = ", ".join(sorted(allowed))
            return f"'{source.layer}' may not include '{name}'; it may include: {may}"
        return None
    if _FRAMEWORK.match(name):
        return f"'{name}' is a framework's: common/ knows none; move this into the binding"
    if _CUDA.match(name) and "cuda" not in Path(source.path).parent.parts:
        return f"'{name}' belongs into files under a cuda/ folder"
    if bracket == '"':
        return f"write '{name}' from the repository's root, so that its layer can be seen"
    return None


def check_environment(source: Source) -> Iterator[Violation]:
    if source.path != ENVIRONMENT:
        text = f"getenv occurs in {ENVIRONMENT} alone; add a knob to Config"
        yield from _occurrences(source, _GETENV, text)


def check_sleeps(source: Source) -> Iterator[Violation]:
    if source.top == "common":
        text = "common/ waits for events, never for time; use a deadline of the event"
        yield from _occurrences(source, _SLEEP, text)


def _occurrences(source: Source, pattern: re.Pattern[str], text: str) -> Iterator[Violation]:
    for match in pattern.finditer(source.code):
        yield source.violation(_line_of(source.code, match.start()), text)


def check_length(source: Source) -> Iterator[Violation]:
    limit = HEADER_LINES if source.path.endswith((".h", ".cuh")) else SOURCE_LINES
    lines = len(source.text.splitlines())
    if lines > limit and source.path not in LONG_FILES:
        yield source.violation(limit + 1, f"{lines} lines, {limit} is the limit; split it by role")
    for first, last in _functions(source.code):
        length = last - first + 1
        if length > FUNCTION_LINES:
            text = f"a function of {length} lines, {FUNCTION_LINES} is the limit; split it"
            yield source.violation(first, text)


def _functions(code: str) -> Iterator[tuple[int, int]]:
    """First and last line of each outermost block that is no scope and no initializer."""
    code = _DIRECTIVE.sub(_blank, code)
    scopes: list[bool] = []  # of each open brace: whether it is a namespace, a class or the like
    begin = 0
    head = 0  # where the text before the next brace begins
    for match in re.finditer(r"[{};]", code):
        inside_function = not all(scopes)
        if match.group() == "{":
            before = code[head : match.start()].strip()
            scopes.append(not inside_function and _SCOPE.match(before) is not None)
            if not inside_function and not scopes[-1]:
                begin = -1 if before.endswith(("=", ",", "(")) else match.start()
        elif match.group() == "}" and scopes:
            scopes.pop()
            if inside_function and all(scopes) and begin >= 0:
                yield _line_of(code, begin), _line_of(code, match.start())
        head = match.end()


def _line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def check_folders(root: Path) -> Iterator[Violation]:
    """The C++ folders that bear a package's name must not be taken for it."""
    for folder in PACKAGE_FREE:
        path = f"{folder}/__init__.py"
        if (root / path).exists():
            yield Violation(path, 1, f"makes {folder}/ hide the real package; delete it")
    for name in PYTORCH_HEADERS:
        for file in sorted((root / "torch").rglob(name)):
            path = file.relative_to(root).as_posix()
            yield Violation(path, 1, f"hides PyTorch's own {name}; give it another name")


CHECKS = (check_includes, check_environment, check_sleeps, check_length)


def violations(root: Path) -> list[Violation]:
    """All violations in the repository at ``root``."""
    found = list(check_folders(root))
    for source in sources(root):
        for check in CHECKS:
            found.extend(check(source))
    return found


def main(arguments: list[str]) -> int:
    root = Path(arguments[0] if arguments else ".")
    if not (root / "common").is_dir():
        print(f"check_layers.py: {root} holds no folder common/; name the repository's root")
        return 2
    found = violations(root)
    print("\n".join(map(str, found)) if found else "layers ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
