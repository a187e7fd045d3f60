"""Which test shows what: for every behaviour of torch.nn.DataParallel (U), and every test of it in PyTorch (T)."""

import ast
import re
from itertools import chain
from pathlib import Path

TESTS = Path(__file__).parents[1]

IDS = {
    *(f"U{i:02}" for i in range(1, 105)),
    *(f"U55{letter}" for letter in "abcde"),
    *(f"T{i:02}" for i in chain(range(1, 36), range(43, 73))),
    "T55a",
}

# A file, and below it its tests, each with the rows that it shows.
SHOWN = """
accelerator/test_accelerator.py
    test_operations_are_those_of_the_cpu: T62
    test_gradients_cross_devices: T62
    test_torch_finds_the_devices: T63
    test_the_current_device_can_be_switched: T63
    test_every_thread_has_its_current_device: T63
    test_a_device_that_does_not_exist: T63
accelerator/test_as_torch.py
    test_as_torch: U04 T07 T16 T72
    test_lists_and_dicts_that_forward_fills: U72
    test_as_torch_between_other_devices: T12 T70
accelerator/test_devices_of_data_parallel.py
    test_the_cpu_among_the_devices: U03
    test_devices_in_all_their_forms: U05 T17
    test_the_constructor_moves_the_module_to_the_one_device: U10
    test_a_module_on_the_wrong_device: T09
    test_components_on_several_devices: T53 T68
accelerator/test_not_as_torch.py
    test_device_ids_that_cannot_be: U06
    test_the_cpu_as_a_target: U07
    test_the_output_device_of_one_device: U32 T71
    test_minus_one_is_the_cpu: U33
    test_the_device_of_a_module_in_parallel_apply: U55c
    test_dicts_with_other_keys: U59
    test_complex_parameters_beside_real_ones: U82
    test_functional_call: U98
accelerator/test_scatter_gather_as_torch.py
    test_a_chunk_that_is_there_already_is_a_view: U38
    test_a_replica_is_on_its_device: U55
    test_parallel_apply_as_torch: T04
    test_gradients_of_scatter_as_torch: T19
    test_gather_as_torch: T21 T50
    test_gather_scalars_as_torch: T21
    test_replicate_as_torch: T23 T24
    test_scatter_as_torch: T49 T52
nn/test_data_parallel.py
    test_signature_starts_as_torch_s: U01
    test_passes_through_without_an_accelerator: U02 U15
    test_devices_must_exist_beside_a_cpu: U03
    test_attributes: U05 U07 U08
    test_mistakes_are_named_when_it_is_built: U05 U06
    test_one_device_moves_the_module_several_do_not: U10
    test_any_dim: U11
    test_attributes_of_the_module_are_reached_through_it: U13
    test_parameters_elsewhere_are_found_at_forward: U16
    test_backward_adds_up_over_replicas_and_calls: U27
    test_the_function_passes_through_without_an_accelerator: U29
    test_replicas_run_side_by_side: U51
    test_a_wrapper_of_one_device_may_wrap_another: U103
nn/test_data_parallel_attributes.py
    test_plain_attributes_that_forward_writes_are_lost: U24
    test_methods_bound_to_the_module_are_those_of_the_replica: U73
nn/test_data_parallel_buffers.py
    test_buffers_are_those_of_the_first_replica: U25 U96
    test_buffers_may_be_written_in_any_way: U25
nn/test_data_parallel_failures.py
    test_one_chunk_on_several_devices_has_notes_too: U21 U23
nn/test_data_parallel_hooks.py
    test_hooks_run_once_a_replica_in_torch_s_order: U95
    test_hooks_of_the_wrapper_run_once: U95
nn/test_data_parallel_inputs.py
    test_where_nothing_is_split_the_module_runs_once: U19 U20
    test_inputs_of_the_function: U28 U31
    test_zero_rows_reach_every_slot: U36
nn/test_data_parallel_methods.py
    test_replicate_may_return_other_modules: U12
    test_scatter_may_be_another: U12
    test_parallel_apply_may_be_another: U12
    test_gather_may_be_another: U12
    test_the_methods_work_when_called_by_themselves: U12
    test_the_order_of_the_methods: U17
nn/test_data_parallel_outputs.py
    test_outputs_on_the_cpu_by_its_old_name: U07
    test_one_device_gives_back_what_the_module_returns: U22
    test_output_device_is_honoured_on_one_device: U22
    test_0_dim_outputs_become_a_vector: U23
nn/test_data_parallel_parameters.py
    test_modules_of_all_kinds: U102
nn/test_data_parallel_state.py
    test_the_call_has_a_name_in_profiles: U14
    test_gradients_are_off_where_they_are_off: U26
    test_the_state_of_the_thread_is_that_of_the_caller: U55a
    test_keys_have_the_prefix: U91
    test_copies_and_files: U92
nn/test_data_parallel_transforms.py
    test_compiled: U100
nn/test_gather.py
    test_outputs_that_do_not_fit: U56 U59 U60 U62
    test_targets: U57
    test_minus_one_stands_for_the_cpu: U57
    test_scalars_become_a_vector: U58
    test_gather_keeps_types: U60
    test_gather_concatenates: U61
    test_no_outputs: U62
    test_gradient_of_gather: U63
nn/test_parallel_apply.py
    test_gpus_of_which_one_is_weaker: U09
    test_as_many_of_everything_as_modules: U49
    test_each_module_is_called_with_its_inputs: U50
    test_one_after_the_other_in_the_calling_thread: U51
    test_no_modules: U51
    test_the_first_of_several_exceptions_arrives: U52
    test_notes_name_the_replica: U52
    test_the_exception_itself_arrives: U53
    test_an_interrupt_passes: U54
    test_modules_see_what_the_caller_sees: U55 U55a
    test_without_tensors_the_device_is_that_of_the_parameters: U55b
    test_devices_of_modules: U55c
    test_a_device_that_there_is_not: U55d
    test_random_numbers_come_from_the_generator_of_the_device: U97
nn/test_replicate.py
    test_the_first_replica_has_the_modules_own_tensors: U25
    test_detached_replicas: U26 U68
    test_any_iterable_of_devices: U64
    test_a_set_of_devices: U64
    test_shared_tensors_and_modules_stay_shared: U65
    test_replicas_are_modules_of_the_same_class: U66 U68 U69
    test_gradients_of_replicas_add_up: U69
    test_copies_need_a_gradient_where_the_original_does: U70
    test_an_unused_parameter_has_no_gradient: U71
    test_replicas_have_hooks_of_their_own_and_share_lists: U72
    test_methods_on_the_instance_are_those_of_the_replica: U73
    test_plain_tensors_are_shared: U74
    test_odd_parameters: U81 U82
    test_copies_of_replicas: U93
nn/test_scatter.py
    test_scatter_cuts_where_chunk_cuts: U34 U35
    test_scatter_keeps_types: U34 U40
    test_scatter_of_no_rows_gives_every_device_no_rows: U36
    test_a_tensor_without_dimensions_goes_to_every_device: U37
    test_scattered_parts_are_views: U38
    test_empty_containers_go_to_every_device: U39 U41
    test_keys_are_not_scattered: U40
    test_what_is_no_tensor_goes_to_every_device_as_it_is: U41
    test_lists_are_not_split_but_their_elements_are: U42
    test_tensors_that_differ_in_rows: U43
    test_scatter_splits_dataclasses: U44
    test_what_holds_rows_but_is_no_tree: U44
    test_without_keywords_each_device_has_none: U45
    test_keywords_only: U45
    test_one_positional_argument_that_is_split_and_a_keyword_that_is_not: U46
    test_fewer_parts_than_devices_with_a_keyword_that_is_no_tensor: U47
    test_scatter_keeps_nothing_alive: U48
    test_gradient_of_scatter: U63
nn/test_upstream_cpp.py
    test_cpp_places_the_output_on_the_requested_device: U32 T70 T71
    test_differentiable_scatter: T64
    test_differentiable_gather: T65
    test_cpp_replicate: T66
    test_cpp_parallel_apply: T67
    test_cpp_parallel_apply_with_different_devices: T68
    test_cpp_parallel_apply_rethrows_exception: T69
    test_cpp_uses_all_available_devices: T72
nn/test_upstream_cuda_multigpu.py
    test_memory_format_scatter_gather: U38 U62 T51
    test_scatter_namedtuple: U39 T52
    test_broadcast: T43
    test_broadcast_makes_no_copy_on_the_source: T44
    test_broadcast_coalesced: T45 T46 T47
    test_broadcast_coalesced_versions: T45
    test_reduce_add: T48
    test_reduce_add_of_sparse_gradients: T48
    test_reduce_add_of_sparse_and_dense_gradients: T48
    test_reduce_add_leaves_independent_gradients: T48
    test_scatter_slices: T49
    test_scatter_by_sizes: T49
    test_gather_order_and_size: T50
    test_gather_namedtuple: T53
nn/test_upstream_data_parallel.py
    test_data_parallel_model_device: U16 U30 T09
    test_data_parallel_module_zero_inputs: U18 U31 T16
    test_data_parallel_rnn: U75 T02
    test_parameter_list_dict_replica: U79 T29
    test_data_parallel: U90 T12
    test_autocast: U101 T26
    test_data_parallel_model_no_refcycles: U104 T10
    test_data_parallel_buffers_requiring_grad: T01
    test_data_parallel_lazy_linear: U76 T03
    test_parallel_apply: T04
    test_parallel_apply_autocast: T05
    test_parallel_apply_passes_exception: T06
    test_data_parallel_multiple_input: T07
    test_data_parallel_small_back: T08
    test_data_parallel_no_grad: T11
    test_data_parallel_sparse: T13
    test_data_parallel_nested_output: T14
    test_data_parallel_nested_input: T15
    test_data_parallel_device_args: T17
    test_data_parallel_function_deletion: T18
    test_scatter: T19
    test_data_parallel_complex: T20
    test_gather: T21
    test_gather_different_len_dicts: T22
    test_replicate: T23
    test_replicate_buffers: T24
    test_zero_grad: U94 T25
    test_save_replica_module: T27
    test_strided_grad_layout: T28
    test_data_parallel_module: T30
    test_data_parallel_module_kwargs_only: T30
nn/test_upstream_jit.py
    test_what_is_compiled_by_torch_jit_is_refused: U78 T31 T32 T33 T34 T35
nn/test_upstream_nn.py
    test_broadcast_not_requiring_grad: U69 T55a
    test_graph_module_replicate_for_dp: U77 T59
    test_spectral_norm: U80 T57
    test_functional_call_with_data_parallel: U98 T58
    test_broadcast_double_backwards: T55
    test_broadcast_no_grad: T55a
    test_data_parallel_with_empty_parameter_shapes: T56
    test_spectral_norm_gradients: T57
    test_qat_data_parallel: T61
    test_observers_preserve_buffers: T61
    test_fake_quant_preserves_buffers: T61
scenarios/test_scenarios_legacy.py
    test_wrapping_twice_is_refused_where_it_would_split_twice: U103
"""

NOT_APPLICABLE = {
    "U55e": "get_a_var is not part of fdp: parallel_apply finds the device by itself",
    "U67": "_former_parameters is not needed where parameters() has them",
    "U83": "broadcast is not part of fdp: replicate is in its place (T43, T44)",
    "U84": "broadcast_coalesced is not part of fdp: replicate is in its place (T45 to T47)",
    "U85": "reduce_add is not part of fdp: it is the gradient of replicate (T48)",
    "U86": "reduce_add_coalesced is not part of fdp: nothing is coalesced (T48)",
    "U87": "comm.scatter with chunk_sizes and out is not part of fdp: scatter and weights= are in its place (T49)",
    "U88": "comm.gather with out is not part of fdp: gather is in its place (T50)",
    "U89": "copies are made on the current stream, so that nothing has to wait for one in the background",
    "U99": "the exporter to ONNX by TorchScript names torch's class; torch.export takes what is in .module",
    "T54": "of streams and the current device of CUDA itself, which DataParallel is not part of",
    "T60": "the exporter to ONNX by TorchScript names torch's class",
}


def tables() -> dict[str, dict[str, list[str]]]:
    """For each file the tests in it, with their rows."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in filter(None, SHOWN.splitlines()):
        if not line.startswith(" "):
            found[line] = {}
            continue
        name, _, rows = line.strip().partition(": ")
        assert re.fullmatch(r"test_\w+", name), line
        assert name not in found[next(reversed(found))], line
        found[next(reversed(found))][name] = [*rows.split()]
    return found


def functions_of(file: Path) -> set[str]:
    """The tests in a file, which is not imported."""
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_row_is_shown_or_does_not_apply():
    shown = {row for tests in tables().values() for rows in tests.values() for row in rows}
    assert not shown & NOT_APPLICABLE.keys()
    assert sorted(shown | NOT_APPLICABLE.keys()) == sorted(IDS)


def test_every_test_exists():
    for file, tests in tables().items():
        assert sorted(tests.keys() - functions_of(TESTS / file)) == [], file
