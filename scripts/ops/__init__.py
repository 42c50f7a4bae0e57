"""Start, watch and stop the whole stack on this machine: what scripts/start.sh, status.sh, stop.sh and logs.sh run."""
