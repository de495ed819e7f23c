"""Failure texts of what a run was told or given wrongly: models, adapters, settings, batches, images, servers.

Rows of the table of `failure_texts.py`: (pattern, cause, next step). Texts were read in the sources and public issues
of transformers, TRL, PEFT, accelerate, DeepSpeed, torch, verl, OpenRLHF, vLLM, SGLang, Megatron-LM and datasets.
"""

from __future__ import annotations

#: What a broader row would take for something else: these go first.
FIRST: tuple[tuple[str, str, str], ...] = (
    (r"Torch not compiled with CUDA", "the installed torch is a build for the CPU alone: nothing runs on the GPU, and "
     "code that asks for one fails", "pip install a torch of the CUDA version that nvidia-smi shows; print "
     "torch.version.cuda, which is None now"),
    (r"(?:localhost|127\.0\.0\.1|0\.0\.0\.0|10(?:\.\d+){3}|172(?:\.\d+){3}|192\.168(?:\.\d+){2}).{0,80}Max retries "
     r"exceeded",
     "no server answers at that address of one's own network: an inference server (or judge) was not started, still "
     "loads its model, died, or listens at another host or port",
     "start it (trl vllm-serve --model ..., on GPUs of its own), wait until its /health answers; look into its log; "
     "leave the address out of the proxy (no_proxy)"),
    (r"(?:GRPO|DPO|PPO|KTO|ORPO|CPO|RLOO|SFT|Reward|OnlineDPO|BCO|GKD)(?:Trainer|Config)\b.{0,80}(?:unexpected "
     r"keyword|has no attribute|missing \d+ required)|cannot import name ['\"](?:PPO|DPO|GRPO|KTO|RLOO|ORPO"
     r"|SFT)\w*['\"]",
     "versions do not fit, the script is written for another one of TRL: tokenizer is called processing_class since "
     "0.12, what was an argument of a trainer (beta, max_length, max_prompt_length) is one of its Config, and "
     "PPOTrainer has no step()",
     "pip show trl; install the version that the script (or unsloth, ms-swift, LLaMA-Factory) pins, or move the "
     "arguments into the Config"),
    (r"Tokenizer\w*' object has no attribute '(?:image_processor|tokenizer|feature_extractor)'",
     "a tokenizer stands where a processor is needed: the model takes images, and its processor was not loaded",
     "AutoProcessor.from_pretrained of the model; check that preprocessor_config.json lies beside it"),
    (r"'\w*Loss' object has no attribute",
     "the loss is of another kind than the script that uses it: a loss of pairs or of rewards (DPO, PPO, GRPO) in a "
     "recipe of demonstrations, or the other way round",
     "take the recipe that is made for this loss (of torchtune: lora_dpo_..., not full_finetune_...), or the recipe's "
     "own loss"),
    (r"'(?:str|list|dict|int|float|tuple)' object has no attribute",
     "a field is of another type than the code expects: messages that are text (or text that is a list of messages), "
     "JSON that was not parsed, one number where a list is asked for",
     "print one sample (and what the reward function is given) with its types at the frame"),
    (r"NCCL [Ee]rror.{0,120}invalid usage", "NCCL was used wrongly: two ranks on one GPU, or tensors of another device "
     "or shape", "NCCL_DEBUG=WARN names it; torch.cuda.set_device(LOCAL_RANK) before the first collective"),
    (r"NCCL [Ee]rror.{0,120}unhandled cuda error|ncclUnhandledCudaError",
     "a CUDA call inside NCCL failed: no GPU memory is left for its buffers, a kernel failed before, or the GPUs "
     "cannot reach each other (drivers, IOMMU, a container's limits)",
     "NCCL_DEBUG=INFO names the call; leave memory free; NCCL_P2P_DISABLE=1 tells whether it is the link"),
    (r"NCCL [Ee]rror.{0,120}unhandled system error",
     "NCCL's network or system call failed (interface, InfiniBand): the wrong interface, InfiniBand that is not "
     "usable, a limit of the container (memlock, /dev/shm) or a peer that is gone",
     "NCCL_DEBUG=INFO names the call; NCCL_SOCKET_IFNAME=IFACE; df -h /dev/shm; ulimit -l"),
)  # fmt: skip

#: What is asked of a model, a tokenizer or an adapter that it does not have.
MODELS: tuple[tuple[str, str, str], ...] = (
    (r"[Ss]ize mismatch between saved .{0,80} and current|saved torch\.Size.{0,80}current",
     "the checkpoint was sharded otherwise than the model that resumes it (another wrap policy, one flat parameter "
     "against many, FSDP1 against FSDP2, another number of ranks): the shapes of its parts do not fit, the weights "
     "themselves may",
     "resume with the wrap policy, use_orig_params and ranks it was saved with, or export whole weights and load those "
     "with a fresh optimizer"),
    (r"[Tt]arget modules? .{0,200}not found in the base model|No modules? .{0,40}target",
     "no layer of the model has the names that the adapter is to be put on (target_modules of another architecture)",
     "print the names of the model's linear layers, or target_modules='all-linear'"),
    (r"vocab(?:ulary)?[ _]size.{0,80}(?:does not match|mismatch|not equal|differ)|tokenizer.{0,60}(?:does not match|"
     r"mismatch).{0,40}(?:vocab|model)|start \(\d+\) \+ length \(\d+\) exceeds dimension size",
     "the model's vocabulary and the tokenizer's are of two sizes: padded embeddings, added tokens, or another model's "
     "tokenizer; a sync or a checkpoint then does not fit the rows of embed_tokens and lm_head",
     "resize_token_embeddings(len(tokenizer)) before training and in the engine, or pad both to one size"),
    (r"No chat template is set|chat_template.{0,40}(?:not set|is None|attribute)",
     "the tokenizer has no chat template, as one of a base model: messages cannot be made into a prompt",
     "set tokenizer.chat_template (an instruct model's of the family), or give prompts as text"),
    (r"padding_side ?= ?['\"]right['\"]|padding side.{0,40}right.{0,80}(?:generat|Flash)",
     "prompts are padded on the right, and a decoder would go on from the padding",
     "tokenizer.padding_side = 'left' before generation"),
    (r"Unrecognized configuration class|for this kind of AutoModel|is not supported by AutoModel",
     "the model is of another kind than the class it is loaded by: a vision-language model by AutoModelForCausalLM, "
     "most often", "AutoModelForImageTextToText (or AutoModelForVision2Seq), or the class of its config.json"),
    (r"model type `\w+`|KeyError: ['\"](?:qwen|llama|gemma|mistral|deepseek|phi|glm|internlm|olmo)[\w.-]*['\"]"
     r"|`rope_scaling` must be|Failed to load the model config|Failed to import transformers\.models"
     r"|Tried to instantiate class",
     "the installed transformers (or engine) is older than the model, or does not know a setting of its config.json",
     "update transformers and the engine together to the version that the model's page names"),
    (r"Cannot find any (?:model )?weights|no file named (?:pytorch_model|model\.safetensors)|Can't find a valid "
     r"checkpoint|no (?:checkpoint|weights) (?:found|files)",
     "the folder holds no weights in a form that is looked for: a trainer's sharded checkpoint where a Hugging Face "
     "folder is expected, or one that was not written to its end",
     "ls the folder; merge the shards first (verl.model_merger, zero_to_fp32.py, a converter of the trainer)"),
    (r"copy out of meta tensor|meta tensor; no data|device meta\b|DeepSpeed Zero-?3 is not compatible",
     "the model is made without data (device 'meta': low_cpu_mem_usage, device_map, an init context of FSDP or ZeRO-3) "
     "and used before its weights are there",
     "no device_map or low_cpu_mem_usage beside ZeRO-3 or FSDP; tied or added modules need to_empty() and a load"),
    (r"purely quantized models|cannot perform fine-tuning on|loaded in \d-bit precision on a different device",
     "a quantised model is trained as it is: its weights are integers, and take no gradient; or it lies on another "
     "device than the process that trains it",
     "attach an adapter (LoRA) and train that; device_map={'': LOCAL_RANK}"),
    (r"PeftModel instance together with|both a PeftModel and|already a PeftModel",
     "a model with an adapter is handed to a trainer that is to add its own",
     "merge_and_unload() the first, or pass no peft_config"),
    (r"logits are (?:not returned|empty)|UNSLOTH_RETURN_LOGITS",
     "unsloth's patched forward returns no logits (it computes the loss without them), and they are asked for",
     "UNSLOTH_RETURN_LOGITS=1 in the environment before the import, or the metric that needs them off"),
    (r"[Uu]nknown quantization method|quantization.{0,40}not supported|FP8 (?:block )?quantization requires"
     r"|cutlass cannot implement|cutlass.{0,40}(?:error|fail)",
     "the quantisation is none that the installed engine, or this GPU, can compute",
     "load in bf16, or an engine and GPU that support it"),
    (r"(?:[Ii]mage|multi-?modal|placeholder|video).{0,60}(?:tokens?|features?|placeholders?).{0,60}(?:do not match|"
     r"mismatch|placeholders?)|Mismatch in `?image`?|Attempted to assign .{0,40}(?:multimodal|image)",
     "images and their placeholder tokens are not as many: the prompt was cut off inside an image, the image was "
     "resized by other limits of pixels than the text was made with, or a processor adds the tokens twice",
     "raise max_prompt_length above the images' tokens; one processor with the same min_pixels and max_pixels for "
     "trainer and engine; filter prompts that are too long"),
)  # fmt: skip

#: Settings that contradict each other, or the machine.
SETTINGS: tuple[tuple[str, str, str], ...] = (
    (r"number of required GPUs exceeds|[Tt]ensor parallel size.{0,60}(?:larger|greater) than|world[ _]size.{0,60}"
     r"(?:larger|greater|less|smaller) than|Invalid device id|not enough (?:devices|GPUs)",
     "more GPUs are asked for (tensor parallel size, world size) than the process or placement group has",
     "tensor_model_parallel_size <= the GPUs of the node that CUDA_VISIBLE_DEVICES or Ray gives"),
    (r"[Ss]leep mode can only be used for one instance|Memory pool is released while being used"
     r"|torch_memory_saver|memory[ _]saver.{0,40}not (?:installed|enabled|available)",
     "the engine's sleeping mode (weights and cache given back between rollouts) cannot be had so: two engines in one "
     "process, an allocator that is not installed or preloaded, or tensors that outlive it",
     "one engine per process with enable_sleep_mode; pip install torch_memory_saver for SGLang; sleep mode off if both "
     "fit into the GPU"),
    (r"Attempting to unscale FP16 gradients",
     "the trained weights themselves are in fp16, and fp16 mixed precision wants them in fp32 (its scaler unscales "
     "fp32 gradients alone)", "load in bf16 and train with bf16=True, or load in fp32 with fp16=True; of LoRA cast the "
     "adapter to fp32"),
    (r"not implemented for ['\"](?:BFloat16|Half|Char|Long|Bool)['\"]|cannot be converted to type at::(?:BFloat16|Half)"
     r"|(?:all|should) .{0,20}(?:have|be) the same dtype|value cannot be converted",
     "an operation does not take the dtype it was given (bf16 or fp16 on a CPU or an old torch, a mask value beyond "
     "what fp16 holds, two dtypes in one attention)",
     "update torch, or cast around the operation that the frame names; torch.finfo(dtype).min as a mask's value"),
    (r"requires a GPU|doesn't support bf16|bf16.{0,40}not supported|unsupported device type|Failed to infer device"
     r"|[Uu]nable to find a valid cuDNN",
     "the precision or the library is not for this device (a CPU, mps, a GPU before Ampere), or no GPU is seen",
     "print torch.cuda.is_available() and get_device_capability(); fp16 or fp32 instead of bf16 on older devices"),
    (r"MPS backend out of memory|Local disk is full|OutOfDiskError",
     "the device or disk is full: memory of Apple's GPU, or the disk that Ray spills to",
     "a smaller batch or model; PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 lifts the limit; df -h"),
    (r"[Pp]lease set at least one of .{0,80}micro_batch_size|micro_batch_size\w* must be set|must be set to a positive"
     r"|(?:cannot|can't) (?:both )?be (?:None|unset)",
     "a setting without a default is not given: the size of a micro-batch (per GPU), most often",
     "set ppo_micro_batch_size_per_gpu and log_prob_micro_batch_size_per_gpu, or use_dynamic_bsz=True with a limit of "
     "tokens; max_steps for a data set without a length"),
    (r"num_generations.{0,40}at least 2|group_size must be greater|at least 2 (?:generations|completions|responses)",
     "a group of one response has no baseline: the advantage of its reward against itself is 0",
     "num_generations (n) of 2 and more, 8 in most recipes"),
    (r"Number of (?:requested|reward) functions does not match|reward weights? .{0,60}(?:match|number)"
     r"|[Rr]eward func\w* .{0,20}returned \d+|must return a list of (?:floats|numbers)|rewards? but expected \d+",
     "the reward functions do not fit: one number for each completion is needed, and a weight for each function",
     "call each by hand on one batch, and compare the length of what it returns; reward_weights as long as "
     "reward_funcs"),
    (r"command not found|Error response from daemon|No matching distribution found",
     "the run has not begun: a program, container or package that it needs is not there (another environment, no "
     "NVIDIA container toolkit, a version that does not exist for this Python)",
     "which PROGRAM in the shell that starts it; docker run --gpus all; pip index versions PACKAGE"),
    (r"batch (?:size )?is (?:0|empty)|no (?:valid )?(?:samples|groups) (?:left|remain)",
     "no sample of the batch is left: a filter (groups without a spread, responses that were cut off) threw all away",
     "print how many each filter leaves; a larger generation batch, or prompts that are sometimes solved"),
    (r"did not return a loss",
     "the model is given no labels, or the trainer's loss is not used (a plain Trainer, columns that were removed)",
     "keep the columns (remove_unused_columns=False), give labels, or the trainer's own compute_loss"),
    (r"no_sync context manager is incompatible|inflight params|gradient partitioning logic",
     "a part of ZeRO-3 and the trainer's loop do not fit: accumulation by no_sync, generation or a second forward "
     "inside a step, a module whose use differs from rank to rank",
     "let DeepSpeed accumulate (gradient_accumulation_steps in its configuration); ZeRO-2 tells whether it is this"),
    (r"[Dd]ata parallel group is not initialized|parallel group is (?:already|not) initialized|Default process "
     r"group has not been initialized|Current vLLM config is not set",
     "the order of the start is wrong: process groups (or the engine's configuration) are used before they are made, "
     "or made twice in one process, as by a trainer and an engine that both bring Megatron's",
     "start by torchrun or the framework's launcher; make the groups once; versions that the framework pins"),
    (r"(?:does not divide|not a multiple of).{0,40}|\d+ does not divide",
     "numbers do not divide: layers or heads over a parallel size, a batch over ranks or micro-batches",
     "sizes that divide what they split"),
    (r"[Pp]rompt (?:length|is).{0,40}(?:exceed|too long)",
     "a prompt is longer than its limit", "filter_overlong_prompts=True, or raise max_prompt_length"),
    (r"FSDP.{0,60}(?:only supports|not support|unsupported)|Cannot flatten|got mixed torch\.Tensor and DTensor"
     r"|data pointer of Tensor that doesn't have storage|params\[0\] in this process|DDP expects same model"
     r"|DistributedDataParallel is not needed",
     "the wrapper of distributed training meets parameters it is not for: frozen or quantised ones (integers), sharded "
     "beside plain ones (DTensor), or another model on another rank",
     "wrap after the adapter is on and before the optimizer is made; the same model and settings on every rank; "
     "use_orig_params=True"),
    (r"FX to symbolically trace a dynamo|dead object store|Failed to unpickle "
     r"serialized exception",
     "the process cannot go on with what another handed it (a compiled function, a lost object, an exception of "
     "another version): the cause stands before it", "enforce_eager=True; the first error of any other process"),
    (r"['\"]ninja['\"]|Ninja is required|ninja -v|Error compiling objects",
     "a kernel cannot be compiled: no ninja, compiler or CUDA toolkit of torch's version",
     "pip install ninja; nvcc --version against torch.version.cuda; a prebuilt wheel"),
    (r"store.based barrier|[Tt]imed out initializing process group",
     "the ranks did not all meet: as many as worker_count says came, and world_size were to",
     "look into the logs of the ranks that did not come; the same WORLD_SIZE and MASTER_ADDR on every node"),
    (r"[Cc]ouldn't reach .{0,80}(?:Hub|hub|http)|on the Hub \(",
     "no network where it is needed: the data set or model is asked of the hub, and this node has no way to it",
     "download beforehand and set HF_HUB_OFFLINE=1 with HF_HOME on a shared disk; HF_ENDPOINT of a mirror"),
    (r"mlx5.{0,80}(?:got completion with error|error)|got completion (?:from peer )?with (?:error|status)"
     r"|IBV_WC_\w+|local work queue operation error|transport retry counter exceeded",
     "InfiniBand (RDMA) failed in the middle of a transfer between nodes: a link or port that is down, a peer that is "
     "gone, memory that cannot be registered (memlock), or GPUs and cards that cannot reach each other",
     "ibstat and dmesg on both nodes; ulimit -l unlimited; NCCL_IB_DISABLE=1 (slow) tells whether it is InfiniBand, "
     "NCCL_IB_HCA names the cards to use"),
)  # fmt: skip

#: What is wrong with a batch or a sample.
BATCHES: tuple[tuple[str, str, str], ...] = (
    (r"index (\d+) is out of bounds for dimension \d+ with size \1\b|IndexError: index \d{5,6} is out of bounds",
     "a token id beyond the vocabulary: added or special tokens that the embedding has no row for, a pad id of "
     "vocab_size, or another model's tokenizer", "compare the largest id with the embedding's rows; "
     "resize_token_embeddings"),
    (r"doesn't match the broadcast shape|cu_seqlens|must have the same (?:size|shape)|Expected hidden"
     r"|multi-?turn.{0,40}mismatch|[Ss]ize mismatch, expected torch|numel: integer multiplication overflow|Tensors "
     r"must be contiguous",
     "shapes do not fit: masks, positions or lengths of one form (padded, packed) beside tokens of another, or a batch "
     "that was sliced along the wrong axis", "print the shapes at the frame; rldbg record keeps both tensors"),
    (r"OverflowError: (?:out of range integral|can't convert negative)",
     "a token id that is none is decoded: -100 of the labels, or a padding of -1",
     "replace ids below 0 by the pad token before batch_decode"),
    (r"KeyError: ['\"](?:old_log_probs?|ref_log_prob|rollout_log_probs|advantages|returns|values|responses|input_ids|"
     r"attention_mask|response_mask|token_level_(?:scores|rewards)|rm_scores|uid|multi_modal_inputs|raw_prompt\w*)['\"]",
     "the batch lacks a field that this step reads: the step that makes it was left out (a reference or critic that is "
     "switched off, log-probabilities that are not computed), or code and configuration are of two versions",
     "print batch.batch.keys() there; switch on what makes it, or off what reads it"),
    (r"ValueError: Input contains NaN|NaN (?:in|detected in) rewards|NaN in policy|[Ll]oss is (?:nan|NaN)"
     r"|(?:policy|gradient|logits).{0,20}\bNaN\b",
     "a reward, loss or gradient is not a number: an overflow or 0/0, a judge that returns NaN, a mask without a token",
     "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump names the first tensor"),
    (r"Boolean value of Tensor with more than one value",
     "a tensor stands where one number or truth value is asked for: a reward, metric or mask of a whole batch in an if",
     "reduce it (.any(), .all(), .mean()) or loop over its elements"),
)  # fmt: skip

#: Errors of code and of data's types: they say how, and the frame says why.
CODE: tuple[tuple[str, str, str], ...] = (
    (r"(?:string|list|tuple) indices must be integers|can only "
     r"concatenate|'(?:float|int|bool)' object is not (?:iterable|subscriptable)",
     "a field is of another type than the code expects: messages that are text (or text that is a list of messages), "
     "JSON that was not parsed, one number where a list is asked for",
     "print one sample (and what the reward function is given) with its types at the frame"),
    (r"(?:not enough|too many) values to unpack",
     "a function returns another number of values than are taken from it: versions that do not fit, or a function of "
     "one's own", "compare its signature with the version's documentation"),
    (r"UnboundLocalError|NameError",
     "the code uses a name that was never set on this path: a missing import, a branch that was not taken; the "
     "training is not at fault", "read the frame; of a framework's own code look for the same line in its issues"),
    (r"could not convert string to float|invalid literal for int|UnicodeDecodeError|codec can't decode",
     "a value of the data or configuration is no number (or no UTF-8 text): 'auto', 'N/A', an answer with words, a "
     "compressed file", "print it; parse it, or leave such samples out"),
    (r"mutable default .{0,80} is not allowed",
     "a package is not made for this version of Python (3.11 refuses mutable defaults of dataclasses)",
     "the Python that the framework names, or an update of the package"),
)  # fmt: skip
