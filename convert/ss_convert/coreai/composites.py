"""Operations that Core AI's compilers know as a whole, declared as private graphs around what they compute.

Apple's exporter declares them the same way (`apple/coreai-models`, `export/externalize.py`: the names and
attributes; `apple/coreai-torch`, `_composite_declaration.py`: the form). Where a runtime has no kernel of
its own it runs the body, so a declaration changes no result there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from coreai._compiler.dialects.coreai import output
from coreai._compiler.ir import Attribute, InsertionPoint
from coreai.authoring import Module, Value
from coreai.authoring.graph_builder import GraphOp

from ss_convert.coreai.tensor import Tensor


class Composites:
    """Declares composites in a module. Every use has a graph of its own: calls of one would be merged.

    function: the entry point that is being built, after which its composites are called.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._count = 0
        self.function = ""

    def call(
        self,
        name: str,
        attributes: Mapping[str, str],
        operands: Mapping[str, Tensor],
        body: Callable[..., Tensor],
    ) -> Value:
        """The result of `body` of the operands, declared as the composite `name`.

        attributes: as MLIR writes them, e.g. `{"scale": "1.0 : f32"}`.
        """
        self._count += 1
        block = self._module._body
        graph = GraphOp(
            f"{self.function}_{name}_{self._count}",
            [operand.value._to_mlir().type for operand in operands.values()],
            [],
            list(operands),
            private=True,
            no_inline=True,
            composite_decl=_declaration(name, attributes, operands),
            ip=InsertionPoint.at_block_begin(block),
        )
        with graph.block:
            result = body(*(Tensor(Value._from_mlir(argument)) for argument in graph.arguments))
            output([result.value._to_mlir()])
        graph.outputs_spec = graph.outputs_spec
        return Value._from_mlir(graph(*(operand.value._to_mlir() for operand in operands.values()))[0])


def _declaration(name: str, attributes: Mapping[str, str], operands: Mapping[str, Tensor]) -> Attribute:
    """The attribute that marks a graph as a composite, version 1."""
    values = {"version": "1 : si64", **attributes}
    inside = ", ".join(f"{key} = {value}" for key, value in sorted(values.items()))
    names = ", ".join(f'"{operand}"' for operand in operands)
    return Attribute.parse(
        f'#coreai.composite_declaration<"{name}" = {{input_names = [{names}], op_attrs = {{{inside}}}, '
        f'output_names = ["output"]}}>'
    )
