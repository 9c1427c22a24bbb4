"""Ranks: started, watched, ended and started again; or joined, where somebody else has started them. `launch` is the face.

rank, outside               one rank on its own side: started by us, or by torchrun or Slurm
watch, ends, restarts       the parent's side: who lives, why they ended, whether they start again
heartbeat, lookout, stacks  where a rank is, which one the others wait for, and where that one stands
own_watch                   the same for a rank that has joined others
stopping                    signals that ask a run to save and stop
lone_rendezvous             torch elastic's meeting place for one machine
interfaces, slurm_step      the network between nodes, and what srun says of its tasks
"""
