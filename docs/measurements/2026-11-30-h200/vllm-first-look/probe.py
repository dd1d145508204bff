import json, os, sys, time, hashlib
mode, model, backend = sys.argv[1], sys.argv[2], sys.argv[3]
cycles = int(sys.argv[4]); out = sys.argv[5]
import pynvml; pynvml.nvmlInit()
h = pynvml.nvmlDeviceGetHandleByIndex(0)
used = lambda: int(pynvml.nvmlDeviceGetMemoryInfo(h, version=pynvml.nvmlMemory_v2).used) >> 20
def main():
    from vllm import LLM, SamplingParams
    kw = {}
    if mode == "ours":
        kw = dict(distributed_executor_backend="checkpoint_executor.vllm.CUDACheckpointExecutor", sleep_mode_backend=backend)
    fast = os.environ.get("FAST")
    if fast: kw["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    t = time.time()
    llm = LLM(model, load_format="dummy", skip_tokenizer_init=True, enable_sleep_mode=True, gpu_memory_utilization=0.5, max_model_len=2048, max_num_seqs=64, enable_prefix_caching=False, seed=0, **kw)
    d = {"mode": mode, "model": model, "backend": backend, "start_s": time.time() - t, "cycles": []}
    sp = SamplingParams(temperature=0.0, max_tokens=64, detokenize=False, logprobs=1, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(i * 7919 + j * 104729) % 150000 for j in range(40)]} for i in range(48)]
    def gen():
        t = time.time(); outs = llm.generate(prompts, sp, use_tqdm=False); dt = time.time() - t
        toks = [list(o.outputs[0].token_ids) for o in outs]
        lps = [[next(iter(p.values())).logprob for p in o.outputs[0].logprobs] for o in outs]
        return hashlib.sha256(json.dumps([toks, lps]).encode()).hexdigest(), len({x for t in toks for x in t}), dt
    ref = gen(); ref2 = gen()
    d["ref"] = ref; d["stable"] = ref[0] == ref2[0]
    d["awake_mib"] = used()
    def sums():
        try: return hashlib.sha256(repr(llm.collective_rpc("compute_weight_checksums")).encode()).hexdigest()
        except Exception as e: return repr(e)[:200]
    d["sums"] = sums()
    for i in range(cycles):
        c = {}
        t = time.time(); llm.sleep(level=1); c["sleep_s"] = time.time() - t
        c["asleep_mib"] = used()
        t = time.time()
        if i == 1:
            llm.wake_up(tags=["weights"]); c["partial_s"] = time.time() - t; llm.wake_up(tags=["kv_cache"])
        else: llm.wake_up()
        c["wake_s"] = time.time() - t
        g = gen(); c["first_s"] = g[2]; c["identical"] = g[0] == ref[0]
        d["cycles"].append(c); print(c, flush=True)
        json.dump(d, open(out, "w"), indent=1)
    d["sums_after"] = sums(); json.dump(d, open(out, "w"), indent=1)
    print(json.dumps({k: v for k, v in d.items() if k != "cycles"}))
if __name__ == "__main__": main()
