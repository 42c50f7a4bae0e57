#!/usr/bin/env bash
# The benchmarks that fit a machine with GPUs, one after the other, each with a time limit.
#
#   bench/gpu/run_all.sh KIND OUTPUT_FOLDER
#
# KIND is one of these, with the number of GPUs first:
#
#   1                     one GPU: single copy, LoRA
#   2                     two: 1.7B over broadcast
#   2-throughput
#   2-faults
#   2-restarts            two
#   2-14b                 two: 14B by single copy over two ranks, and by broadcast to one
#   compare               two: 1.7B and, in what is left of eight minutes, 14B over broadcast, ours beside vLLM's own engine
#   2-crossed             two: 14B to two ranks from a trainer of two ranks, one of each on a GPU. A rank that is late. Start MPS
#                         before, or the two processes of each GPU take turns
#   fleet-2               two: 1.7B under 256 and 512 requests, keys and values recomputed and kept, beside vLLM's own engine. And
#                         14B from FSDP2 over both to two ranks, crossed
#   fleet-4               four: 1.7B to 1, 2 and 3 servers under 64 requests each, every one on a GPU of its own, beside vLLM's own
#                         engine
#   fleet-faults          four; two, or one, for faults that need no more: a fleet of three light servers, needs no vLLM
#   4                     four: 14B to two ranks
#   4-ranks               four: the same from a trainer of two ranks
#   4-crossed             four: 14B to four ranks from a trainer of four, one of each on a GPU. MPS as for 2-crossed
#   4-late                three or more: a rank that is late
#   gathering             four; two and four ranks gather 14B. Needs no vLLM
#   deterministic         one: parity
#   deterministic-cost    one: speed, learning
#   2-layouts             two: deterministic trainers of two ranks, needs no server
#   exact                 one: 200 steps over each bridge, twice, that must end in the same weights
#   resumed               one: 40 steps over each bridge, twice, one of them killed in the middle and resumed: the same weights
#   exact-on-ray          one; two for a broadcast too: a run on Ray killed whole and started again: the same weights
#   colocate              one: trainer and vLLM take turns on it
#   memory                one; two for sharded training: the memory plan against real steps, needs no vLLM
#   optimizer             one: step time and memory of AdamW in float32 and in 8 bits, offloaded or not, needs no vLLM
#   trainer-speed         one; two for 14B over both. CASE names the only case to run, see bench/trainer_speed.py
#   sampling-cost         one: what a token costs the server
#   whole-run             two: ours beside TRL. QUESTIONS names GSM8K's train.jsonl
#   learning              any number: methods compared, MODEL names what studies/word_problems/make_model.py wrote. The same again
#                         goes on, and trains what bench/results/learning.json lacks if the model was measured there
#   async                 two, or one that they share: in turns, overlapped, off-policy by 1, 2 and 4. MODEL names a checkpoint's
#                         folder, else the starter model. LR its learning rate, 3e-4 if not given, which is far too much for a large
#                         one
#   modes                 whole trainings, as many kinds as the GPUs suffice for. All with four
#   ranks                 two; one for the float16 servers: trainers that start their own ranks, and trainers beside a float16
#                         server
#   checks                one: tests/gpu/check_*.py
#   33-learned            one: updates of tiny models that vLLM's CPU build cannot run or update, at most five minutes
#   33-any-model          one: Qwen3-1.7B by the decoder of ours and through transformers
#   33-sampling, 33-updates   one: /generate at 512 sequences, deterministic sampling, waits for updates
#   33-modes
#   33-faults             one
#   33-parity             one
#   33-whole-run          two
#   33-exact-2, 33-exact-2-fsdp, 33-exact-2-single-copy, 33-exact-2-8b   two: tokens of a server with two tensor-parallel ranks
#                         against a trainer of one, FSDP2 over two, a single copy of two ranks. 8B against a trainer of one
#   33-exact-steps-2      two: 200 steps of a server of two ranks with each of three trainers, twice, that must end in the same
#                         weights. All at the same time under CUDA's MPS, which it starts, unless MPS=0. MODES names some of them
#   33-exact-resumed-2    two: 40 steps, twice, one killed in the middle and resumed. MODES as above
#   8-guide               eight: the guide's 72B run, ten steps, then vLLM is killed and started again. MODEL names the folder for the
#                         random checkpoint of 145 GB, which is used again; DRY=1 takes the starter model on the CPU
#   4-whole-run           four: 8B, vLLM over two and the trainer over two, ours and deterministic
#   4-exact, 4-exact-fsdp4    four: a server with four ranks against trainers of one and FSDP2 over two, and against FSDP2 over four
#   33-sampling-tp2       two: vLLM without the mode, in its own and in ours, over two GPUs
#   4-sampling            four: the same over four GPUs, in fewer rounds
#   33-lengths            one: the trainer's exact pass beside the ordinary one at 512, 4k and 32k tokens, with its kernels
#   33-gradients          one: the blocks that its gradient kernels may be cut into, beside cuBLAS and FlashAttention 4. Four
#                         minutes
#   33-moe-products       one: the blocks that the product of an expert's few rows may be cut into, beside PyTorch's grouped product
#   33-moe-*              mixtures of experts with the sizes of Qwen3-30B-A3B, on GPUs of 80 GB
#   33-moe-checks         one: router, experts and their gradients by themselves, and their speed. Needs no server
#   33-moe-parity         one: 12 of its 48 layers, a million tokens
#   33-moe-exact-2        two: the same of 24 layers, with two tensor-parallel ranks
#   33-moe-sampling       one: all layers. vLLM without the mode, in its own and in ours
#   33-moe-trainer        one: passes and steps at 4k, ordinary and exact
#   33-moe-update         two: all layers by broadcast
#   4-moe, 4-moe-update   four: vLLM on one and a trainer over three by FSDP2, as many layers as fit. 50 deterministic steps, and
#                         updates of all layers. MODEL names the folder for the random checkpoint, which is used again
#   4-moe-on-policy, 4-moe-one-step-off    four: the same trainer's speed in steps of 512 answers, without and with answers sampled ahead
#   33-moe-model          one: makes MODEL, the mixture of 33-moe-learning
#   33-moe-learning       any number: 18 trainings of 400 steps, 16 minutes on four GPUs with five at a time on each. So it runs in
#                         the background. The same again goes on with what did not end within LIMIT seconds
#   33-moe-replay         one: the starter model as a mixture, ordinary, with router replay, and deterministic
#   33-moe-steps          one: 200 deterministic steps of it, twice, that must end in the same weights
#   cpu                   a tiny model, to try the scripts
#   one-gpu               one: exact, learning, resumed, checks, modes, deterministic, async and colocate in turn. Its model is made
#                         if MODEL names no folder. 45 minutes, so where commands have a time limit: `setsid nohup
#                         bench/gpu/run_all.sh one-gpu out > log 2>&1 &`
#
# The kinds of 33 name the installed vLLM in the names of their results. So the same kind under two versions gives two files. DRY=1 tries
# them with tiny shapes on the CPU.
# Each other kind ends within ten minutes, checks within twenty. A machine's first server start is part of the first kind that is
# run on it.
# The kinds 2, 2-14b, compare and fleet-* also measure vLLM's own engine, which needs vLLM 0.26 (bench/gpu/vllm_engine_trainer.py).
# LOCKSTEP_COMMIT names the commit that is measured, where there is no .git folder.
# Ends with status 1 if any script failed. Results and logs are in OUTPUT_FOLDER, one folder for each script.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
kind=${1:?which kind, see the head of this file} out=${2:?an output folder}
python=${PYTHON:-python3}
status=0 parts=()
run() {
  local seconds=$1 name=$2 script=$3
  shift 3
  local began=$SECONDS
  mkdir -p "$out/$name"
  echo "== $name (at most $seconds s)"
  # SIGTERM lets the script stop its processes and print what it has; then it is killed.
  timeout -k 25 "$seconds" "$python" -u "$script" --output "$out/$name" "$@" || {
    echo "== $name: status $?"
    status=1
  }
  echo "== $name took $((SECONDS - began)) s"
}
version='' tiny=() dry=()
if [[ $kind == 33-* || $kind == 4-exact* || $kind == 4-sampling || $kind == 4-whole-run || $kind == 4-moe* ]]; then
  version=$("$python" -m bench.gpu.machine) || exit 1
  [[ -z ${DRY:-} ]] || tiny=(--device cpu --tiny) dry=(--device cpu)
fi
case $kind in
  1)
    run 270 single_copy bench/weight_sync.py --parts single_copy --concurrency 64
    run 250 lora_swap bench/weight_sync.py --parts lora --concurrency 64 --interval 2
    ;;
  2) run 520 weight_sync bench/weight_sync.py --parts ceiling bridge engine ;;
  compare)
    # Shorter pauses between updates than in kind 2, so that both shapes fit; twice as long above 64 requests.
    run 320 weight_sync bench/weight_sync.py --parts ceiling bridge engine --interval 0.3
    # Direct alone, as in 2-14b.
    run $((475 - SECONDS)) weight_sync_14b_one_rank bench/weight_sync.py --shape qwen2.5-14b --parts ceiling bridge engine \
      --transfers direct --concurrency 64 --name weight_sync_qwen2.5-14b_one_rank
    ;;
  2-throughput) run 520 weight_sync_throughput bench/weight_sync.py --parts throughput --name weight_sync_qwen3-1.7b_throughput ;;
  2-faults) run 530 bridge_faults tests/gpu/check_bridge_faults.py --only layout port second nan trainer stop ;;
  2-restarts) run 530 bridge_restarts tests/gpu/check_bridge_faults.py --only worker restart --name bridge_restarts ;;
  2-14b)
    run 250 single_copy_14b bench/weight_sync.py --parts single_copy --concurrency 64 --shape qwen2.5-14b --tp 2 \
      --name single_copy_qwen2.5-14b
    # Direct alone: what an overlapped transfer stages would leave no room for the trainer of vLLM's engine on the same GPU.
    run 270 weight_sync_14b_one_rank bench/weight_sync.py --shape qwen2.5-14b --parts ceiling bridge engine --transfers direct \
      --concurrency 64 --name weight_sync_qwen2.5-14b_one_rank
    ;;
  2-crossed)
    run 330 weight_sync_14b_crossed bench/weight_sync.py --shape qwen2.5-14b --tp 2 --trainer-ranks 2 --crossed \
      --parts ceiling bridge --concurrency 64 --name weight_sync_qwen2.5-14b_crossed
    run 190 bridge_faults_tp2 tests/gpu/check_bridge_faults.py --tp 2 --only late --crossed --name bridge_faults_tp2
    ;;
  fleet-2)
    run 340 fleet bench/weight_sync.py --parts clients engine --concurrency 256 512 --interval 0.3 --name fleet
    run 200 fleet_14b_crossed bench/weight_sync.py --shape qwen2.5-14b --tp 2 --trainer-ranks 2 --crossed --parts ceiling bridge \
      --concurrency 64 --interval 0.3 --name fleet_14b_crossed
    ;;
  fleet-4) run 540 fleet_servers bench/weight_sync.py --parts servers --updates 12 --interval 0.3 --concurrency 64 \
    --name fleet_servers_gpu ;;
  4) run 520 weight_sync_14b bench/weight_sync.py --shape qwen2.5-14b --tp 2 --parts ceiling bridge engine --concurrency 64 ;;
  4-ranks)
    run 400 weight_sync_14b_ranks bench/weight_sync.py --shape qwen2.5-14b --tp 2 --trainer-ranks 2 --parts bridge \
      --concurrency 64 --name weight_sync_qwen2.5-14b_trainer_ranks
    ;;
  4-crossed)
    run 450 weight_sync_14b_tp4 bench/weight_sync.py --shape qwen2.5-14b --tp 4 --trainer-ranks 4 --crossed --parts ceiling bridge \
      --concurrency 64 --name weight_sync_qwen2.5-14b_tp4
    ;;
  4-late) run 300 bridge_faults_tp2 tests/gpu/check_bridge_faults.py --tp 2 --only late --name bridge_faults_tp2 ;;
  gathering) run 300 gathering bench/gathering.py ;;
  deterministic) run 520 parity_matrix tests/gpu/check_parity_matrix.py ;;
  deterministic-cost)
    run 330 deterministic_cost bench/deterministic_cost.py
    run 300 bi_on_off studies/bitwise/on_off.py --jobs 6
    ;;
  33-exact-steps-2)
    # In turns on a GPU, two ranks on two GPUs seldom meet: under MPS they compute at the same time.
    if [[ -z ${DRY:-} && ${MPS:-1} == 1 && -z ${CUDA_MPS_PIPE_DIRECTORY:-} ]]; then
      exec "$python" -m bench.gpu.mps bash bench/gpu/run_all.sh "$kind" "$out"
    fi
    modes=(deterministic_single_copy_tp2 deterministic_broadcast_tp2 deterministic_broadcast_tp2_fsdp2)
    asked=(--steps 200 --repeat 2 --seconds 440)
    # A CPU has no deterministic mode: it tries the script with one that learns alike.
    [[ -z ${DRY:-} ]] || modes=(single_copy_tp2) asked=(--steps 2 --repeat 2 --device cpu --eager)
    for mode in ${MODES:-${modes[@]}}; do
      { run 540 "exact_steps_$mode" tests/gpu/check_training_modes.py --only "$mode" "${asked[@]}" --name "exact_$mode$version"; exit "$status"; } &
      parts+=("$!")
    done
    for part in "${parts[@]}"; do wait "$part" || status=1; done
    ;;
  33-exact-resumed-2)
    # A killed program may end others under MPS.
    modes=(deterministic_single_copy_tp2 deterministic_broadcast_tp2_fsdp2)
    asked=(--steps 40 --repeat 2 --kill-after 20)
    [[ -z ${DRY:-} ]] || modes=(single_copy_tp2) asked=(--steps 2 --repeat 2 --kill-after 1 --device cpu --eager)
    run 540 exact_resumed_2 tests/gpu/check_training_modes.py --only ${MODES:-${modes[@]}} "${asked[@]}" --name "exact_resumed_tp2$version"
    ;;
  33-exact-2*|4-exact*)
    asked=(--shape qwen3-1.7b) folder=${kind#33-}
    case $kind in
      33-exact-2) ;;
      33-exact-2-fsdp) asked+=(--trainer-ranks 2) ;;
      33-exact-2-single-copy) asked+=(--bridge single-copy) ;;
      33-exact-2-8b) asked=(--shape qwen3-8b) ;;
      4-exact) asked+=(--tensor-parallel 4 --trainer-ranks 1 2) ;;
      4-exact-fsdp4) asked+=(--tensor-parallel 4 --trainer-ranks 4 --brief) ;;
    esac
    # A CPU tries the four GPUs' layouts over two ranks.
    [[ -z ${DRY:-} || $kind != 4-exact* ]] || asked=(--trainer-ranks 2 --brief)
    run 540 "$folder" tests/gpu/check_exact_layouts.py "${asked[@]}" --version-ending "$version" ${tiny[@]+"${tiny[@]}"}
    ;;
  exact)
    for mode in deterministic_single_copy deterministic_broadcast; do
      { run 530 "$mode" tests/gpu/check_training_modes.py --only "$mode" --steps 200 --repeat 2 --seconds 420 --name "exact_$mode"; exit "$status"; } &
      parts+=("$!")
    done
    for part in "${parts[@]}"; do wait "$part" || status=1; done
    ;;
  resumed)
    run 400 resumed tests/gpu/check_training_modes.py --only deterministic_single_copy deterministic_broadcast --steps 40 --repeat 2 \
      --kill-after 20 --name resumed
    ;;
  exact-on-ray)
    run 290 async_exact tests/gpu/check_async_exact.py
    gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') # as in CUDA_VISIBLE_DEVICES
    [[ $gpus == 1 ]] || run 290 async_exact_broadcast tests/gpu/check_async_exact.py --copies 2 --name async_exact_broadcast
    ;;
  colocate) run 535 colocate bench/colocate.py ;;
  memory) run 530 memory_plan tests/gpu/check_memory_plan.py ;;
  optimizer) run 580 optimizer_choices bench/optimizer_choices.py ;;
  trainer-speed) run 500 trainer_speed bench/trainer_speed.py --seconds 480 ${CASE:+--only "$CASE"} ;;
  sampling-cost) run 420 generate_cost bench/generate_cost.py --ramp 15 --seconds 15 ;;
  whole-run) run 570 whole_run bench/whole_run.py --seconds 550 ${QUESTIONS:+--questions "$QUESTIONS"} ;;
  learning)
    # As those were trained that are there already, or none of them could be kept.
    run 575 learning studies/learning/trainings.py --model "${MODEL:?the folder of studies/word_problems/make_model.py}" --seconds 550 \
      --steps 100 --jobs 12 --mps --add-to bench/results/learning.json
    ;;
  async) run 560 async_modes bench/async_modes.py --steps 40 --sequences 256 --group 16 --in-flight 512 --seconds 90 \
    ${MODEL:+--model "$MODEL"} ${LR:+--lr "$LR"} ;;
  modes)
    run 530 training_modes tests/gpu/check_training_modes.py --eager --only single_copy lora broadcast_direct broadcast_overlapped restart \
      single_copy_tp2 broadcast_tp2_fsdp2 broadcast_two_servers broadcast_two_on_one_gpu parameter_server \
      parameter_server_one_gpu parameter_server_host_memory deterministic_single_copy deterministic_broadcast
    ;;
  ranks)
    run 530 ranks tests/gpu/check_training_modes.py --eager --steps 10 --name ranks --only single_copy_tp2 broadcast_fsdp2 chosen_tp2 \
      broadcast_float16 chosen_float16 lora_float16
    ;;
  fleet-faults)
    mkdir -p "$out/fleet_faults"
    timeout -k 25 580 "$python" -u tests/gpu/check_fleet_faults.py --json "$out/fleet_faults/fleet_faults_gpu.json" \
      --logs "$out/fleet_faults/logs" || status=1
    ;;
  checks)
    mkdir -p "$out/checks"
    for name in fast_table deterministic_trainer single_copy_pieces killed_writer out_of_memory; do
      seconds=150
      [[ $name != deterministic_trainer ]] || seconds=420 # it compiles the most kernels
      echo "== $name (at most $seconds s)"
      timeout -k 25 "$seconds" "$python" -u "tests/gpu/check_$name.py" --json "$out/checks/$name.json" || {
        echo "== $name: status $?"
        status=1
      }
    done
    ;;
  2-layouts)
    mkdir -p "$out"
    timeout -k 25 500 "$python" -u tests/gpu/check_deterministic_layouts.py --json "$out/deterministic_layouts.json" || status=1
    ;;
  one-gpu)
    # The first of them leaves most of the processor idle, on which the model's texts are made.
    if [[ -z ${MODEL:-} ]]; then
      MODEL=$out/model
      mkdir -p "$MODEL"
      timeout -k 25 600 "$python" -u -m studies.word_problems.make_model --output "$MODEL" > "$MODEL.log" 2>&1 &
      parts+=("$!")
    fi
    MODEL='' bench/gpu/run_all.sh exact "$out" || status=1
    for part in "${parts[@]}"; do wait "$part" || status=1; done
    MODEL=$MODEL bench/gpu/run_all.sh learning "$out" || status=1
    for each in resumed checks modes deterministic async colocate; do
      echo "== one-gpu: $each begins after $SECONDS s"
      MODEL='' bench/gpu/run_all.sh "$each" "$out" || status=1 # that model is for word problems alone
    done
    ;;
  33-learned)
    mkdir -p "$out"
    timeout -k 25 300 "$python" -u tests/gpu/check_learned_layouts.py --json "$out/learned_layouts$version.json" \
      ${dry[@]+"${dry[@]}"} || status=1
    ;;
  33-any-model)
    run 540 any_model bench/any_model.py --seconds 520 --name "any_model$version" ${tiny[@]+"${tiny[@]}"}
    ;;
  33-sampling)
    run 230 generate_cost bench/generate_cost.py --ways numbers "vLLM completions" --ramp 15 --seconds 15 \
      --name "generate_cost$version" ${tiny[@]+"${tiny[@]}"}
    # vLLM's modes are the GPU's; a CPU tries the script with the trainer's step.
    parts=(rollout)
    [[ -z ${DRY:-} ]] || parts=(step)
    run 300 deterministic_cost bench/deterministic_cost.py --parts "${parts[@]}" --name "deterministic_cost$version" \
      ${tiny[@]+"${tiny[@]}"}
    ;;
  33-sampling-tp2|4-sampling)
    # vLLM's modes are the GPU's; a CPU tries the script with the ordinary one, on one rank. FlashInfer's sums are compiled at the
    # first start, for two minutes.
    ranks=2 rounds=9
    [[ $kind == 33-* ]] || ranks=4 rounds=5
    layout=(--tp "$ranks" --rounds "$rounds" --loads "1 sequence" "32 sequences" "256 sequences")
    [[ -z ${DRY:-} ]] || layout=(--modes off)
    run 560 "deterministic_cost_tp$ranks" bench/deterministic_cost.py --parts rollout "${layout[@]}" \
      --name "deterministic_cost_tp$ranks$version" ${tiny[@]+"${tiny[@]}"}
    ;;
  33-lengths) run 560 exact_lengths bench/gpu/exact_lengths.py --name "exact_lengths$version" ${tiny[@]+"${tiny[@]}"} ;;
  33-gradients)
    size=(--device cuda)
    [[ -z ${DRY:-} ]] || size=(--device cpu --tiny)
    run 240 gradient_kernels bench/gpu/gradient_kernels.py --name "gradient_kernels$version" "${size[@]}"
    ;;
  33-moe-products)
    size=(--device cuda)
    [[ -z ${DRY:-} ]] || size=(--device cpu --tiny)
    run 240 expert_products bench/gpu/expert_products.py --name "expert_products$version" "${size[@]}"
    ;;
  33-updates)
    run 300 updates bench/weight_sync.py --parts single_copy --concurrency 64 512 --name "updates$version" ${tiny[@]+"${tiny[@]}"}
    ;;
  33-modes)
    modes=(single_copy lora broadcast_direct broadcast_overlapped restart single_copy_tp2 broadcast_tp2_fsdp2 broadcast_two_servers
      parameter_server_one_gpu parameter_server_host_memory deterministic_single_copy deterministic_broadcast)
    [[ -z ${DRY:-} ]] || modes=(single_copy)
    run 535 training_modes tests/gpu/check_training_modes.py --eager --name "training_modes$version" --only "${modes[@]}" \
      ${dry[@]+"${dry[@]}"}
    ;;
  33-faults)
    run 535 bridge_faults tests/gpu/check_bridge_faults.py --beside --modes direct overlapped --only layout second nan trainer stop \
      --name "bridge_faults$version" ${tiny[@]+"${tiny[@]}"}
    ;;
  33-parity)
    run 535 parity_matrix tests/gpu/check_parity_matrix.py --name "parity_matrix$version" ${tiny[@]+"${tiny[@]}"}
    ;;
  33-whole-run|4-whole-run)
    # Both parts' servers are on the same GPUs of 80 GB.
    whole=(--seconds 520 --parts ours deterministic --cache-gib 28)
    [[ -z ${DRY:-} ]] || whole=(--dry-run --parts ours)
    name=whole_run
    if [[ $kind == 4-whole-run ]]; then
      name=whole_run_8b
      whole+=(--shape qwen3-8b --tensor-parallel 2 --trainer-ranks 2 --cache-gib 20 --sequences 128 --steps 9 --leave-out 2)
      whole+=(--training-seconds 190)
    fi
    run 540 "$name" bench/whole_run.py "${whole[@]}" --name "$name$version" ${QUESTIONS:+--questions "$QUESTIONS"}
    ;;
  33-moe-checks)
    # The checks are a GPU's; a CPU tries a mixture's with tiny sizes.
    mkdir -p "$out"
    program=(tests/gpu/check_deterministic_trainer.py --json "$out/moe_checks$version.json")
    [[ -z ${DRY:-} ]] || program=(-m pytest -q tests/gpu/test_mixture_checks.py)
    timeout -k 25 420 "$python" -u "${program[@]}" || status=1
    ;;
  33-moe-parity)
    run 535 moe_parity tests/gpu/check_parity_matrix.py --shape qwen3-30b-a3b-12l --at-a-time 2 --least-tokens 1000000 \
      --name "moe_parity$version" ${tiny[@]+"${tiny[@]}"}
    ;;
  33-moe-exact-2)
    run 540 moe_exact_2 tests/gpu/check_exact_layouts.py --shape qwen3-30b-a3b-24l --name "moe_exact_tp2$version" \
      ${tiny[@]+"${tiny[@]}"}
    ;;
  4-moe|4-moe-on-policy|4-moe-one-step-off)
    # The memory plan has up to 127 GiB on each of three GPUs for all layers, and about a half for 24 of them. Moments in 8 bits
    # stay on the GPU; in float32 they would pass over the bus in each step.
    shape=qwen3-30b-a3b name=moe_whole_run
    [[ $(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits -i 0 2> /dev/null || echo 0) -gt 120000 ]] || shape+=-24l
    whole=(--seconds 525 --parts deterministic)
    [[ -z ${DRY:-} ]] || whole=(--dry-run --parts ours)
    case $kind in
      4-moe)
        # Nothing is sampled ahead, so that every trained token is of the present weights, and is compared.
        whole+=(--steps 50 --leave-out 5 --sequences 64 --in-flight 64 --cap 128 --staleness 0 --ahead 0 --cache-gib 8)
        whole+=(--training-seconds 400 --trainer-flags "--tokens-per-microbatch 4096 --optimizer adamw-8bit")
        ;;
      *)
        whole+=(--steps 8 --leave-out 3 --sequences 512 --in-flight 512 --cap 512 --cache-gib 36 --training-seconds 300)
        whole+=(--trainer-flags "--tokens-per-microbatch 6144 --optimizer adamw-8bit")
        ;;&
      4-moe-on-policy) name=moe_on_policy whole+=(--staleness 0 --ahead 0) ;;
      4-moe-one-step-off) name=moe_one_step_off whole+=(--staleness 1 --ahead 2) ;;
    esac
    run 540 "$name" bench/whole_run.py --shape "${SHAPE:-$shape}" --trainer-ranks 3 "${whole[@]}" --name "$name$version" \
      ${QUESTIONS:+--questions "$QUESTIONS"} ${MODEL:+--checkpoint "$MODEL"}
    ;;
  4-moe-update)
    ranks=(--trainer-ranks 3)
    [[ -z ${DRY:-} ]] || ranks=(--trainer-ranks 2)
    run 420 moe_update_fsdp3 bench/weight_sync.py --shape qwen3-30b-a3b "${ranks[@]}" --parts bridge --transfers direct --drawn \
      --cache-gib 6 --concurrency 64 --name "moe_update_fsdp3$version" ${tiny[@]+"${tiny[@]}"}
    ;;
  8-guide)
    # Four GPUs of 141 GB cannot hold float32 masters and gradients of 72B: the trainer has six, with moments in 8 bits, and vLLM two.
    guide=(--shape qwen2.5-72b --seconds 500 ${MODEL:+--checkpoint "$MODEL"})
    if [[ -n ${DRY:-} ]]; then
      guide=(--dry-run)
    elif [[ $(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits -i 0 2> /dev/null || echo 0) -gt 170000 ]]; then
      guide+=(--server-gpus 4)
    else
      guide+=(--server-gpus 2 --trainer-flags "--optimizer adamw-8bit")
    fi
    run 540 guide_72b bench/guide_commands.py multi-gpu --kill-server --name guide_72b "${guide[@]}"
    ;;
  33-moe-model)
    made=(--shape mixture --seconds 360)
    [[ -z ${DRY:-} ]] || made=(--shape tiny-mixture --device cpu --workers 0)
    timeout -k 25 570 "$python" -u -m studies.word_problems.make_model --output "${MODEL:?the folder to write}" "${made[@]}" || status=1
    ;;
  33-moe-learning)
    # As many at a time on each GPU as end in the limit; an earlier mixtures.json in ADD is gone on with.
    limit=${LIMIT:-1000}
    study=(--model "${MODEL:-}" --steps 400 --jobs "${JOBS:-5}" --mps --cache-gib 1 --seconds "$limit")
    study+=(--run-timeout "$limit" --start-seconds 190 --step-seconds 1.8)
    [[ -z ${DRY:-} ]] || study=(--device cpu --tiny)
    study+=(${ADD:+--add-to "$ADD"})
    [[ -n ${DRY:-} || -n ${MODEL:-} ]] || { echo "run_all: MODEL names the folder of 33-moe-model" >&2; exit 2; }
    run $((limit + 25)) moe_learning studies/learning/mixtures.py "${study[@]}"
    ;;
  33-moe-sampling)
    # As in 33-sampling-tp2, a CPU tries the ordinary mode alone.
    layout=()
    [[ -z ${DRY:-} ]] || layout=(--modes off)
    run 540 moe_sampling bench/deterministic_cost.py --parts rollout --shape qwen3-30b-a3b --one-at-a-time --new-tokens 256 \
      --loads "32 sequences" "256 sequences" --name "moe_sampling$version" ${layout[@]+"${layout[@]}"} ${tiny[@]+"${tiny[@]}"}
    ;;
  33-moe-trainer)
    # 80 GB hold 5 layers with their optimizer; 12 with masters and moments in 91 GiB of the host's memory.
    few=(--shape qwen3-30b-a3b-5l) many=(--shape qwen3-30b-a3b-12l)
    [[ -z ${DRY:-} ]] || few=(--shape tiny-mixture --device cpu) many=(--shape tiny-mixture --device cpu)
    run 200 moe_trainer bench/trainer_speed.py --alone --only "1.7B, 4k" "1.7B, 4k, deterministic" --seconds 190 \
      --name "moe_trainer$version" "${few[@]}"
    run 340 moe_trainer_offloaded bench/trainer_speed.py --alone --only "8B, one GPU, offloaded" \
      "8B, one GPU, offloaded, deterministic" --seconds 325 --name "moe_trainer_offloaded$version" "${many[@]}"
    ;;
  33-moe-update)
    run 420 moe_update bench/weight_sync.py --shape qwen3-30b-a3b --parts bridge --transfers direct --drawn --cache-gib 6 \
      --concurrency 64 --name "moe_update$version" ${tiny[@]+"${tiny[@]}"}
    ;;
  33-moe-replay)
    modes=(mixture mixture_replay mixture_deterministic)
    [[ -z ${DRY:-} ]] || modes=(mixture)
    run 535 moe_replay tests/gpu/check_training_modes.py --steps 20 --seconds 180 --name "moe_replay$version" --only "${modes[@]}" \
      ${dry[@]+"${dry[@]}"}
    ;;
  33-moe-steps)
    modes=(--only mixture_deterministic --steps 200)
    [[ -z ${DRY:-} ]] || modes=(--only mixture --steps 8)
    run 535 moe_steps tests/gpu/check_training_modes.py --repeat 2 --seconds 420 --name "moe_steps$version" "${modes[@]}" \
      ${dry[@]+"${dry[@]}"}
    ;;
  cpu)
    run 600 weight_sync bench/weight_sync.py --device cpu --tiny --parts ceiling bridge throughput
    run 600 fleet bench/weight_sync.py --device cpu --tiny --parts clients servers --name fleet
    for part in single_copy lora; do
      run 600 "$part" bench/weight_sync.py --device cpu --tiny --parts "$part"
    done
    run 600 bridge_faults tests/gpu/check_bridge_faults.py --device cpu --tiny
    ;;
  *)
    echo "run_all: no kind '$kind'; see the head of $0" >&2
    exit 2
    ;;
esac
exit "$status"
