"""Which test shows what: for every behaviour of torch.nn.DataParallel (U), and every test of it in PyTorch (T)."""

import ast
from itertools import chain
from pathlib import Path

TESTS = Path(__file__).parents[1]

IDS = {
    *(f"U{i:02}" for i in range(1, 105)),
    *(f"U55{letter}" for letter in "abcde"),
    *(f"T{i:02}" for i in chain(range(1, 36), range(43, 73))),
    "T55a",
}

PARITY: dict[str, str | tuple[str, ...]] = {
    # ---- construction and attributes
    "U01": "nn/test_data_parallel.py::test_signature_starts_as_torch_s",
    "U02": "nn/test_data_parallel.py::test_passes_through_without_an_accelerator",
    "U03": (
        "nn/test_data_parallel.py::test_devices_must_exist_beside_a_cpu",
        "accelerator/test_devices_of_data_parallel.py::test_the_cpu_among_the_devices",
    ),
    "U04": "accelerator/test_as_torch.py::test_as_torch",
    "U05": (
        "nn/test_data_parallel.py::test_attributes",
        "nn/test_data_parallel.py::test_mistakes_are_named_when_it_is_built",
        "accelerator/test_devices_of_data_parallel.py::test_devices_in_all_their_forms",
    ),
    "U06": (
        "nn/test_data_parallel.py::test_mistakes_are_named_when_it_is_built",
        "accelerator/test_not_as_torch.py::test_device_ids_that_cannot_be",
    ),
    "U07": (
        "nn/test_data_parallel.py::test_attributes",
        "nn/test_data_parallel_outputs.py::test_outputs_on_the_cpu_by_its_old_name",
        "accelerator/test_not_as_torch.py::test_the_cpu_as_a_target",
    ),
    "U08": "nn/test_data_parallel.py::test_attributes",
    "U09": "nn/test_parallel_apply.py::test_gpus_of_which_one_is_weaker",
    "U10": (
        "nn/test_data_parallel.py::test_one_device_moves_the_module_several_do_not",
        "accelerator/test_devices_of_data_parallel.py::test_the_constructor_moves_the_module_to_the_one_device",
    ),
    "U11": "nn/test_data_parallel.py::test_any_dim",
    "U12": (
        "nn/test_data_parallel_methods.py::test_replicate_may_return_other_modules",
        "nn/test_data_parallel_methods.py::test_scatter_may_be_another",
        "nn/test_data_parallel_methods.py::test_parallel_apply_may_be_another",
        "nn/test_data_parallel_methods.py::test_gather_may_be_another",
        "nn/test_data_parallel_methods.py::test_the_methods_work_when_called_by_themselves",
    ),
    "U13": "nn/test_data_parallel.py::test_attributes_of_the_module_are_reached_through_it",
    # ---- forward
    "U14": "nn/test_data_parallel_state.py::test_the_call_has_a_name_in_profiles",
    "U15": "nn/test_data_parallel.py::test_passes_through_without_an_accelerator",
    "U16": (
        "nn/test_data_parallel.py::test_parameters_elsewhere_are_found_at_forward",
        "nn/test_upstream_data_parallel.py::test_data_parallel_model_device",
    ),
    "U17": "nn/test_data_parallel_methods.py::test_the_order_of_the_methods",
    "U18": "nn/test_upstream_data_parallel.py::test_data_parallel_module_zero_inputs",
    "U19": "nn/test_data_parallel_inputs.py::test_where_nothing_is_split_the_module_runs_once",
    "U20": "nn/test_data_parallel_inputs.py::test_where_nothing_is_split_the_module_runs_once",
    "U21": "nn/test_data_parallel_inputs.py::test_rows_are_cut_as_torch_chunk_does",
    "U22": (
        "nn/test_data_parallel_outputs.py::test_one_device_gives_back_what_the_module_returns",
        "nn/test_data_parallel_outputs.py::test_output_device_is_honoured_on_one_device",
    ),
    "U23": (
        "nn/test_data_parallel_failures.py::test_one_chunk_on_several_devices_has_notes_too",
        "nn/test_data_parallel_outputs.py::test_0_dim_outputs_become_a_vector",
    ),
    "U24": "nn/test_data_parallel_attributes.py::test_plain_attributes_that_forward_writes_are_lost",
    "U25": (
        "nn/test_replicate.py::test_the_first_replica_has_the_modules_own_tensors",
        "nn/test_data_parallel_buffers.py::test_buffers_are_those_of_the_first_replica",
        "nn/test_data_parallel_buffers.py::test_buffers_may_be_written_in_any_way",
    ),
    "U26": (
        "nn/test_data_parallel_state.py::test_gradients_are_off_where_they_are_off",
        "nn/test_replicate.py::test_detached_replicas",
    ),
    "U27": "nn/test_data_parallel.py::test_backward_adds_up_over_replicas_and_calls",
    # ---- data_parallel
    "U28": "nn/test_data_parallel_inputs.py::test_inputs_of_the_function",
    "U29": "nn/test_data_parallel.py::test_the_function_passes_through_without_an_accelerator",
    "U30": "nn/test_upstream_data_parallel.py::test_data_parallel_model_device",
    "U31": (
        "nn/test_upstream_data_parallel.py::test_data_parallel_module_zero_inputs",
        "nn/test_data_parallel_inputs.py::test_inputs_of_the_function",
    ),
    "U32": (
        "nn/test_upstream_cpp.py::test_cpp_places_the_output_on_the_requested_device",
        "accelerator/test_not_as_torch.py::test_the_output_device_of_one_device",
    ),
    "U33": "accelerator/test_not_as_torch.py::test_minus_one_is_the_cpu",
    # ---- scatter
    "U34": ("nn/test_scatter.py::test_scatter_cuts_where_chunk_cuts", "nn/test_scatter.py::test_scatter_keeps_types"),
    "U35": "nn/test_scatter.py::test_scatter_cuts_where_chunk_cuts",
    "U36": (
        "nn/test_scatter.py::test_scatter_of_no_rows_gives_every_device_no_rows",
        "nn/test_data_parallel_inputs.py::test_zero_rows_reach_every_slot",
    ),
    "U37": "nn/test_scatter.py::test_a_tensor_without_dimensions_goes_to_every_device",
    "U38": (
        "nn/test_scatter.py::test_scattered_parts_are_views",
        "nn/test_upstream_cuda_multigpu.py::test_memory_format_scatter_gather",
        "accelerator/test_scatter_gather_as_torch.py::test_a_chunk_that_is_there_already_is_a_view",
    ),
    "U39": (
        "nn/test_scatter.py::test_empty_containers_go_to_every_device",
        "nn/test_upstream_cuda_multigpu.py::test_scatter_namedtuple",
    ),
    "U40": ("nn/test_scatter.py::test_scatter_keeps_types", "nn/test_scatter.py::test_keys_are_not_scattered"),
    "U41": (
        "nn/test_scatter.py::test_what_is_no_tensor_goes_to_every_device_as_it_is",
        "nn/test_scatter.py::test_empty_containers_go_to_every_device",
    ),
    "U42": "nn/test_scatter.py::test_lists_are_not_split_but_their_elements_are",
    "U43": "nn/test_scatter.py::test_tensors_that_differ_in_rows",
    "U44": (
        "nn/test_scatter.py::test_scatter_splits_dataclasses",
        "nn/test_scatter.py::test_what_holds_rows_but_is_no_tree",
    ),
    "U45": ("nn/test_scatter.py::test_without_keywords_each_device_has_none", "nn/test_scatter.py::test_keywords_only"),
    "U46": "nn/test_scatter.py::test_one_positional_argument_that_is_split_and_a_keyword_that_is_not",
    "U47": "nn/test_scatter.py::test_fewer_parts_than_devices_with_a_keyword_that_is_no_tensor",
    "U48": "nn/test_scatter.py::test_scatter_keeps_nothing_alive",
    # ---- parallel_apply
    "U49": "nn/test_parallel_apply.py::test_as_many_of_everything_as_modules",
    "U50": "nn/test_parallel_apply.py::test_each_module_is_called_with_its_inputs",
    "U51": (
        "nn/test_parallel_apply.py::test_one_after_the_other_in_the_calling_thread",
        "nn/test_parallel_apply.py::test_no_modules",
        "nn/test_data_parallel.py::test_replicas_run_side_by_side",
    ),
    "U52": (
        "nn/test_parallel_apply.py::test_the_first_of_several_exceptions_arrives",
        "nn/test_parallel_apply.py::test_notes_name_the_replica",
    ),
    "U53": (
        "nn/test_parallel_apply.py::test_the_exception_itself_arrives",
        "nn/test_data_parallel_failures.py::test_the_exception_itself_arrives",
    ),
    "U54": (
        "nn/test_parallel_apply.py::test_an_interrupt_passes",
        "nn/test_data_parallel_failures.py::test_interrupts_pass",
    ),
    "U55": (
        "nn/test_parallel_apply.py::test_modules_see_what_the_caller_sees",
        "accelerator/test_scatter_gather_as_torch.py::test_a_replica_is_on_its_device",
    ),
    "U55a": (
        "nn/test_parallel_apply.py::test_modules_see_what_the_caller_sees",
        "nn/test_data_parallel_state.py::test_the_state_of_the_thread_is_that_of_the_caller",
    ),
    "U55b": "nn/test_parallel_apply.py::test_without_tensors_the_device_is_that_of_the_parameters",
    "U55c": (
        "nn/test_parallel_apply.py::test_devices_of_modules",
        "accelerator/test_not_as_torch.py::test_the_device_of_a_module_in_parallel_apply",
    ),
    "U55d": "nn/test_parallel_apply.py::test_a_device_that_there_is_not",
    # ---- gather
    "U56": "nn/test_gather.py::test_outputs_that_do_not_fit",
    "U57": ("nn/test_gather.py::test_targets", "nn/test_gather.py::test_minus_one_stands_for_the_cpu"),
    "U58": (
        "nn/test_gather.py::test_scalars_become_a_vector",
        "nn/test_gather.py::test_scalars_become_a_vector_along_any_dim",
    ),
    "U59": (
        "nn/test_gather.py::test_outputs_that_do_not_fit",
        "accelerator/test_not_as_torch.py::test_dicts_with_other_keys",
    ),
    "U60": (
        "nn/test_gather.py::test_gather_keeps_types",
        "nn/test_gather.py::test_outputs_that_do_not_fit",
        "nn/test_data_parallel_outputs.py::test_values_that_are_no_tensors_are_returned_once",
    ),
    "U61": "nn/test_gather.py::test_gather_concatenates",
    "U62": (
        "nn/test_gather.py::test_no_outputs",
        "nn/test_gather.py::test_outputs_that_do_not_fit",
        "nn/test_upstream_cuda_multigpu.py::test_memory_format_scatter_gather",
    ),
    "U63": ("nn/test_gather.py::test_gradient_of_gather", "nn/test_scatter.py::test_gradient_of_scatter"),
    # ---- replicate
    "U64": ("nn/test_replicate.py::test_any_iterable_of_devices", "nn/test_replicate.py::test_a_set_of_devices"),
    "U65": "nn/test_replicate.py::test_shared_tensors_and_modules_stay_shared",
    "U66": "nn/test_replicate.py::test_replicas_are_modules_of_the_same_class",
    "U68": (
        "nn/test_replicate.py::test_replicas_are_modules_of_the_same_class",
        "nn/test_replicate.py::test_detached_replicas",
    ),
    "U69": (
        "nn/test_replicate.py::test_gradients_of_replicas_add_up",
        "nn/test_replicate.py::test_replicas_are_modules_of_the_same_class",
        "nn/test_upstream_nn.py::test_broadcast_not_requiring_grad",
    ),
    "U70": "nn/test_replicate.py::test_copies_need_a_gradient_where_the_original_does",
    "U71": (
        "nn/test_replicate.py::test_an_unused_parameter_has_no_gradient",
        "nn/test_data_parallel_parameters.py::test_unused_parameters_keep_no_gradient",
    ),
    "U72": (
        "nn/test_replicate.py::test_replicas_have_hooks_of_their_own_and_share_lists",
        "accelerator/test_as_torch.py::test_lists_and_dicts_that_forward_fills",
    ),
    "U73": (
        "nn/test_replicate.py::test_methods_on_the_instance_are_those_of_the_replica",
        "nn/test_data_parallel_attributes.py::test_methods_bound_to_the_module_are_those_of_the_replica",
    ),
    "U74": "nn/test_replicate.py::test_plain_tensors_are_shared",
    "U75": (
        "nn/test_replicate.py::test_recurrent_networks",
        "nn/test_upstream_data_parallel.py::test_data_parallel_rnn",
    ),
    "U76": "nn/test_replicate.py::test_lazy_modules",
    "U77": "nn/test_upstream_nn.py::test_graph_module_replicate_for_dp",
    "U78": "nn/test_upstream_jit.py::test_what_is_compiled_by_torch_jit_is_refused",
    "U79": (
        "nn/test_replicate.py::test_lists_and_dicts_of_parameters",
        "nn/test_upstream_data_parallel.py::test_parameter_list_dict_replica",
    ),
    "U80": "nn/test_upstream_nn.py::test_spectral_norm",
    "U81": "nn/test_replicate.py::test_odd_parameters",
    "U82": (
        "nn/test_replicate.py::test_odd_parameters",
        "accelerator/test_not_as_torch.py::test_complex_parameters_beside_real_ones",
    ),
    "U90": "nn/test_upstream_data_parallel.py::test_data_parallel",
    # ---- the rest of PyTorch
    "U91": (
        "nn/test_data_parallel_state.py::test_keys_have_the_prefix",
        "nn/test_data_parallel_state.py::test_keys_of_the_wrapper_and_of_the_module_are_taken",
    ),
    "U92": "nn/test_data_parallel_state.py::test_copies_and_files",
    "U93": ("nn/test_replicate.py::test_replicas_can_be_saved", "nn/test_replicate.py::test_copies_of_replicas"),
    "U94": "nn/test_replicate.py::test_zero_grad_of_a_replica",
    "U95": (
        "nn/test_data_parallel_hooks.py::test_hooks_run_once_a_replica_in_torch_s_order",
        "nn/test_data_parallel_hooks.py::test_hooks_of_the_wrapper_run_once",
    ),
    "U96": "nn/test_data_parallel_buffers.py::test_buffers_are_those_of_the_first_replica",
    "U97": "nn/test_parallel_apply.py::test_random_numbers_come_from_the_generator_of_the_device",
    "U98": (
        "nn/test_upstream_nn.py::test_functional_call_with_data_parallel",
        "accelerator/test_not_as_torch.py::test_functional_call",
    ),
    "U100": "nn/test_data_parallel_transforms.py::test_compiled",
    "U101": "nn/test_upstream_data_parallel.py::test_autocast",
    "U102": "nn/test_data_parallel_parameters.py::test_modules_of_all_kinds",
    "U103": (
        "scenarios/test_scenarios_legacy.py::test_wrapping_twice_is_refused_where_it_would_split_twice",
        "nn/test_data_parallel.py::test_a_wrapper_of_one_device_may_wrap_another",
    ),
    "U104": "nn/test_upstream_data_parallel.py::test_data_parallel_model_no_refcycles",
    # ---- test/distributed/test_data_parallel.py
    "T01": "nn/test_upstream_data_parallel.py::test_data_parallel_buffers_requiring_grad",
    "T02": "nn/test_upstream_data_parallel.py::test_data_parallel_rnn",
    "T03": "nn/test_upstream_data_parallel.py::test_data_parallel_lazy_linear",
    "T04": (
        "nn/test_upstream_data_parallel.py::test_parallel_apply",
        "accelerator/test_scatter_gather_as_torch.py::test_parallel_apply_as_torch",
    ),
    "T05": "nn/test_upstream_data_parallel.py::test_parallel_apply_autocast",
    "T06": "nn/test_upstream_data_parallel.py::test_parallel_apply_passes_exception",
    "T07": (
        "nn/test_upstream_data_parallel.py::test_data_parallel_multiple_input",
        "accelerator/test_as_torch.py::test_as_torch",
    ),
    "T08": "nn/test_upstream_data_parallel.py::test_data_parallel_small_back",
    "T09": (
        "nn/test_upstream_data_parallel.py::test_data_parallel_model_device",
        "accelerator/test_devices_of_data_parallel.py::test_a_module_on_the_wrong_device",
    ),
    "T10": "nn/test_upstream_data_parallel.py::test_data_parallel_model_no_refcycles",
    "T11": "nn/test_upstream_data_parallel.py::test_data_parallel_no_grad",
    "T12": (
        "nn/test_upstream_data_parallel.py::test_data_parallel",
        "accelerator/test_as_torch.py::test_as_torch_between_other_devices",
    ),
    "T13": "nn/test_upstream_data_parallel.py::test_data_parallel_sparse",
    "T14": "nn/test_upstream_data_parallel.py::test_data_parallel_nested_output",
    "T15": "nn/test_upstream_data_parallel.py::test_data_parallel_nested_input",
    "T16": (
        "nn/test_upstream_data_parallel.py::test_data_parallel_module_zero_inputs",
        "accelerator/test_as_torch.py::test_as_torch",
    ),
    "T17": (
        "nn/test_upstream_data_parallel.py::test_data_parallel_device_args",
        "accelerator/test_devices_of_data_parallel.py::test_devices_in_all_their_forms",
    ),
    "T18": "nn/test_upstream_data_parallel.py::test_data_parallel_function_deletion",
    "T19": (
        "nn/test_upstream_data_parallel.py::test_scatter",
        "accelerator/test_scatter_gather_as_torch.py::test_gradients_of_scatter_as_torch",
    ),
    "T20": "nn/test_upstream_data_parallel.py::test_data_parallel_complex",
    "T21": (
        "nn/test_upstream_data_parallel.py::test_gather",
        "accelerator/test_scatter_gather_as_torch.py::test_gather_as_torch",
        "accelerator/test_scatter_gather_as_torch.py::test_gather_scalars_as_torch",
    ),
    "T22": "nn/test_upstream_data_parallel.py::test_gather_different_len_dicts",
    "T23": (
        "nn/test_upstream_data_parallel.py::test_replicate",
        "accelerator/test_scatter_gather_as_torch.py::test_replicate_as_torch",
    ),
    "T24": (
        "nn/test_upstream_data_parallel.py::test_replicate_buffers",
        "accelerator/test_scatter_gather_as_torch.py::test_replicate_as_torch",
    ),
    "T25": "nn/test_upstream_data_parallel.py::test_zero_grad",
    "T26": "nn/test_upstream_data_parallel.py::test_autocast",
    "T27": "nn/test_upstream_data_parallel.py::test_save_replica_module",
    "T28": "nn/test_upstream_data_parallel.py::test_strided_grad_layout",
    # But for one thing: the parameters of the first replica are the module's own, leaves without a `grad_fn`.
    "T29": "nn/test_upstream_data_parallel.py::test_parameter_list_dict_replica",
    "T30": (
        "nn/test_upstream_data_parallel.py::test_data_parallel_module",
        "nn/test_upstream_data_parallel.py::test_data_parallel_module_kwargs_only",
    ),
    # ---- test/jit/test_data_parallel.py
    "T31": "nn/test_upstream_jit.py::test_what_is_compiled_by_torch_jit_is_refused",
    "T32": "nn/test_upstream_jit.py::test_what_is_compiled_by_torch_jit_is_refused",
    "T33": "nn/test_upstream_jit.py::test_what_is_compiled_by_torch_jit_is_refused",
    "T34": "nn/test_upstream_jit.py::test_what_is_compiled_by_torch_jit_is_refused",
    "T35": "nn/test_upstream_jit.py::test_what_is_compiled_by_torch_jit_is_refused",
    # ---- test/test_cuda_multigpu.py: what fdp has for torch.nn.parallel.comm
    "T43": "nn/test_upstream_cuda_multigpu.py::test_broadcast",
    "T44": "nn/test_upstream_cuda_multigpu.py::test_broadcast_makes_no_copy_on_the_source",
    "T45": (
        "nn/test_upstream_cuda_multigpu.py::test_broadcast_coalesced",
        "nn/test_upstream_cuda_multigpu.py::test_broadcast_coalesced_versions",
    ),
    "T46": "nn/test_upstream_cuda_multigpu.py::test_broadcast_coalesced",
    "T47": "nn/test_upstream_cuda_multigpu.py::test_broadcast_coalesced",
    "T48": (
        "nn/test_upstream_cuda_multigpu.py::test_reduce_add",
        "nn/test_upstream_cuda_multigpu.py::test_reduce_add_of_sparse_gradients",
        "nn/test_upstream_cuda_multigpu.py::test_reduce_add_of_sparse_and_dense_gradients",
        "nn/test_upstream_cuda_multigpu.py::test_reduce_add_leaves_independent_gradients",
    ),
    "T49": (
        "nn/test_upstream_cuda_multigpu.py::test_scatter_slices",
        "nn/test_upstream_cuda_multigpu.py::test_scatter_by_sizes",
        "accelerator/test_scatter_gather_as_torch.py::test_scatter_as_torch",
    ),
    "T50": (
        "nn/test_upstream_cuda_multigpu.py::test_gather_order_and_size",
        "accelerator/test_scatter_gather_as_torch.py::test_gather_as_torch",
    ),
    "T51": "nn/test_upstream_cuda_multigpu.py::test_memory_format_scatter_gather",
    "T52": (
        "nn/test_upstream_cuda_multigpu.py::test_scatter_namedtuple",
        "accelerator/test_scatter_gather_as_torch.py::test_scatter_as_torch",
    ),
    "T53": (
        "nn/test_upstream_cuda_multigpu.py::test_gather_namedtuple",
        "accelerator/test_devices_of_data_parallel.py::test_components_on_several_devices",
    ),
    # ---- elsewhere
    "T55": "nn/test_upstream_nn.py::test_broadcast_double_backwards",
    "T55a": (
        "nn/test_upstream_nn.py::test_broadcast_not_requiring_grad",
        "nn/test_upstream_nn.py::test_broadcast_no_grad",
    ),
    "T56": "nn/test_upstream_nn.py::test_data_parallel_with_empty_parameter_shapes",
    "T57": (
        "nn/test_upstream_nn.py::test_spectral_norm",
        "nn/test_upstream_nn.py::test_spectral_norm_gradients",
    ),
    "T58": "nn/test_upstream_nn.py::test_functional_call_with_data_parallel",
    "T59": "nn/test_upstream_nn.py::test_graph_module_replicate_for_dp",
    "T61": (
        "nn/test_upstream_nn.py::test_qat_data_parallel",
        "nn/test_upstream_nn.py::test_observers_preserve_buffers",
        "nn/test_upstream_nn.py::test_fake_quant_preserves_buffers",
    ),
    "T62": (
        "accelerator/test_accelerator.py::test_operations_are_those_of_the_cpu",
        "accelerator/test_accelerator.py::test_gradients_cross_devices",
    ),
    "T63": (
        "accelerator/test_accelerator.py::test_torch_finds_the_devices",
        "accelerator/test_accelerator.py::test_the_current_device_can_be_switched",
        "accelerator/test_accelerator.py::test_every_thread_has_its_current_device",
        "accelerator/test_accelerator.py::test_a_device_that_does_not_exist",
    ),
    # ---- test/cpp/api/parallel.cpp
    "T64": "nn/test_upstream_cpp.py::test_differentiable_scatter",
    "T65": "nn/test_upstream_cpp.py::test_differentiable_gather",
    "T66": "nn/test_upstream_cpp.py::test_cpp_replicate",
    "T67": "nn/test_upstream_cpp.py::test_cpp_parallel_apply",
    "T68": (
        "nn/test_upstream_cpp.py::test_cpp_parallel_apply_with_different_devices",
        "accelerator/test_devices_of_data_parallel.py::test_components_on_several_devices",
    ),
    "T69": "nn/test_upstream_cpp.py::test_cpp_parallel_apply_rethrows_exception",
    "T70": (
        "nn/test_upstream_cpp.py::test_cpp_places_the_output_on_the_requested_device",
        "accelerator/test_as_torch.py::test_as_torch_between_other_devices",
    ),
    "T71": (
        "nn/test_upstream_cpp.py::test_cpp_places_the_output_on_the_requested_device",
        "accelerator/test_not_as_torch.py::test_the_output_device_of_one_device",
    ),
    "T72": (
        "nn/test_upstream_cpp.py::test_cpp_uses_all_available_devices",
        "accelerator/test_as_torch.py::test_as_torch",
    ),
}

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

MISSING: dict[str, str] = {}


def shown_by(row: str) -> tuple[str, ...]:
    tests = PARITY[row]
    return (tests,) if isinstance(tests, str) else tests


def functions_of(file: Path) -> set[str]:
    """The tests in a file, which is not imported."""
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_no_row_is_missing():
    assert not MISSING


def test_every_row_is_in_one_table():
    rows = [*PARITY, *NOT_APPLICABLE, *MISSING]
    assert sorted(rows) == sorted(IDS)


def test_rows_are_in_order():
    for table in (PARITY, NOT_APPLICABLE, MISSING):
        assert list(table) == sorted(table, key=lambda row: (row[0] != "U", int(row[1:].rstrip("abcde")), row))


def test_every_test_exists():
    named = {test for row in PARITY for test in shown_by(row)}
    assert all(len(set(shown_by(row))) == len(shown_by(row)) for row in PARITY)
    files = {test.split("::")[0] for test in named}
    existing = {f"{file}::{name}" for file in files for name in functions_of(TESTS / file)}
    assert sorted(named - existing) == []
    assert all(test.split("::")[1].startswith("test_") for test in named)
