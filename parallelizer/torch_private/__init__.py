"""The only files that reach into torch's private modules and operators.

Each entry says why it is needed and which public replacement it waits for.
"""

from parallelizer.torch_private.attention import attention_written_out as attention_written_out
from parallelizer.torch_private.attention import cudnn_attention as cudnn_attention
from parallelizer.torch_private.attention import cudnn_attention_backward as cudnn_attention_backward
from parallelizer.torch_private.attention import efficient_attention as efficient_attention
from parallelizer.torch_private.attention import efficient_attention_backward as efficient_attention_backward
from parallelizer.torch_private.attention import flash_attention_cpu as flash_attention_cpu
from parallelizer.torch_private.attention import flash_attention_cpu_backward as flash_attention_cpu_backward
from parallelizer.torch_private.attention import flash_attention_cuda as flash_attention_cuda
from parallelizer.torch_private.attention import (
    flash_attention_cuda_backward as flash_attention_cuda_backward,
)
from parallelizer.torch_private.attention import (
    flash_attention_of_sequences as flash_attention_of_sequences,
)
from parallelizer.torch_private.attention import (
    flash_attention_of_sequences_backward as flash_attention_of_sequences_backward,
)
from parallelizer.torch_private.attention import multi_head_attention_forward as multi_head_attention_forward
from parallelizer.torch_private.backward import fsdp_modules as fsdp_modules
from parallelizer.torch_private.backward import gather_once as gather_once
from parallelizer.torch_private.backward import in_backward as in_backward
from parallelizer.torch_private.backward import reduce_gradients as reduce_gradients
from parallelizer.torch_private.backward import sharded_and_whole as sharded_and_whole
from parallelizer.torch_private.backward import unsharded_gradients as unsharded_gradients
from parallelizer.torch_private.compiling import COSTLY_OPERATORS as COSTLY_OPERATORS
from parallelizer.torch_private.compiling import assert_all as assert_all
from parallelizer.torch_private.compiling import compiled_graphs as compiled_graphs
from parallelizer.torch_private.compiling import raised_while_compiling as raised_while_compiling
from parallelizer.torch_private.compiling import stops_recomputation as stops_recomputation
from parallelizer.torch_private.cuda import forked_after_cuda as forked_after_cuda
from parallelizer.torch_private.elementless import Elementless as Elementless
from parallelizer.torch_private.fake_tensors import FakeTensors as FakeTensors
from parallelizer.torch_private.fake_tensors import GroupedProducts as GroupedProducts
from parallelizer.torch_private.flex import NOT_FLEX as NOT_FLEX
from parallelizer.torch_private.flex import FlexAnswer as FlexAnswer
from parallelizer.torch_private.flex import FlexCall as FlexCall
from parallelizer.torch_private.flex import FlexCalls as FlexCalls
from parallelizer.torch_private.flex import of_compiled_flex as of_compiled_flex
from parallelizer.torch_private.fsdp_gathers import GatherExtension as GatherExtension
from parallelizer.torch_private.fsdp_gathers import extend_gathers as extend_gathers
from parallelizer.torch_private.grouped import is_grouped_mm as is_grouped_mm
from parallelizer.torch_private.grouped import scaled_grouped_mm as scaled_grouped_mm
from parallelizer.torch_private.memory import allocating as allocating
from parallelizer.torch_private.memory import allocations as allocations
from parallelizer.torch_private.memory import memory_history as memory_history
from parallelizer.torch_private.modules import call_instead as call_instead
from parallelizer.torch_private.modules import children_of as children_of
from parallelizer.torch_private.modules import drop_parameter as drop_parameter
from parallelizer.torch_private.modules import empty_twin as empty_twin
from parallelizer.torch_private.modules import has_empty_child as has_empty_child
from parallelizer.torch_private.modules import in_written_classes as in_written_classes
from parallelizer.torch_private.modules import is_persistent as is_persistent
from parallelizer.torch_private.modules import outline_twin as outline_twin
from parallelizer.torch_private.modules import replace_tensors as replace_tensors
from parallelizer.torch_private.modules import set_child as set_child
from parallelizer.torch_private.modules import twin as twin
from parallelizer.torch_private.optimizers import has_step_hooks as has_step_hooks
from parallelizer.torch_private.process_groups import LateWork as LateWork
from parallelizer.torch_private.process_groups import arrived as arrived
from parallelizer.torch_private.process_groups import exchanged as exchanged
from parallelizer.torch_private.process_groups import fake_store as fake_store
from parallelizer.torch_private.process_groups import finished_work as finished_work
from parallelizer.torch_private.process_groups import flatten_mesh as flatten_mesh
from parallelizer.torch_private.process_groups import group_name as group_name
from parallelizer.torch_private.process_groups import group_of as group_of
from parallelizer.torch_private.process_groups import group_ranks as group_ranks
from parallelizer.torch_private.process_groups import join_meshes as join_meshes
from parallelizer.torch_private.process_groups import largest_of_ranks as largest_of_ranks
from parallelizer.torch_private.process_groups import map_pending as map_pending
from parallelizer.torch_private.process_groups import opened_group as opened_group
from parallelizer.torch_private.process_groups import opened_work as opened_work
from parallelizer.torch_private.process_groups import own_sum as own_sum
from parallelizer.torch_private.process_groups import set_group_timeout as set_group_timeout
from parallelizer.torch_private.process_groups import split_axis as split_axis
from parallelizer.torch_private.random_numbers import draw_from_own_generators as draw_from_own_generators
from parallelizer.torch_private.redistribution import made_plain as made_plain
from parallelizer.torch_private.redistribution import planned_redistributions as planned_redistributions
from parallelizer.torch_private.redistribution import propagates_shapes as propagates_shapes
from parallelizer.torch_private.redistribution import redistributed_to as redistributed_to
from parallelizer.torch_private.redistribution import redistribution_path as redistribution_path
from parallelizer.torch_private.tensors import TorchDispatchMode as TorchDispatchMode
from parallelizer.torch_private.tensors import has_values as has_values
from parallelizer.torch_private.tensors import is_made_of_tensors as is_made_of_tensors
from parallelizer.torch_private.tensors import is_sharded as is_sharded
from parallelizer.torch_private.tensors import local_tensor as local_tensor
from parallelizer.torch_private.tensors import multiply_ as multiply_
from parallelizer.torch_private.tensors import norms as norms
from parallelizer.torch_private.tensors import storage_key as storage_key
from parallelizer.torch_private.tensors import tree_leaves as tree_leaves
from parallelizer.torch_private.tensors import tree_map_leaves as tree_map_leaves
from parallelizer.torch_private.tensors import tree_map_tensors as tree_map_tensors
from parallelizer.torch_private.tensors import tree_map_where as tree_map_where
from parallelizer.torch_private.tensors import use_counts as use_counts
from parallelizer.torch_private.tensors import version as version
