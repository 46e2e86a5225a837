"""The token dispatcher inside Megatron-Core, in the order in which a training meets its files.

registration     hooks into Megatron's modules, left until they are imported
arguments        fields and checks of Megatron's arguments and configurations, of `options`
                 and `supported_settings`
layer            builds an MoE layer with our dispatcher
layer_setup      sets the dispatcher up with the layer's other ranks, by `ranks` and `planning`
dispatcher       the six phases of a micro-batch, by its `count_sources`; `experts` runs the
                 pipeline that holds the experts too
first_use        checks a choice before it first carries rows
auto             makes the choice of each optimizer step, which `optimizer_steps` counts; the
                 files of its `results` outlive the process
"""
