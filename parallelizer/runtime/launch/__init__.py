"""Starts, watches, ends and restarts ranks, or joins ranks that another launcher started. `launch` is the
entry point.

rank, outside               one rank on its own side: started here, or by torchrun or Slurm
watch, ends, restarts       the parent's side: which ranks run, why they ended, whether they start again
heartbeat, lookout, stacks  the step of a rank, the rank that the others wait for, and its Python stack
records, lacking            what ranks remember of their collectives, and which ranks lack one
gpu_rank, numa              what a rank on a GPU sets, and the cores that it is bound to
own_watch                   the same for a rank that has joined others
stopping                    signals that ask a run to save and stop
lone_rendezvous             torch elastic's rendezvous for one machine
interfaces, slurm_step      the network between nodes, and the environment of srun's tasks
"""
