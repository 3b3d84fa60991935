# preStop of a vLLM server. Kubernetes takes the pod out of its lists meanwhile, so that no new request comes.
# PORT: that of vLLM. HOLD_SECONDS: how long the KV of finished prompts stays for decode servers that have not read it yet.
sleep "${SETTLE_SECONDS:-5}"
# A server that does not answer, or that has no such metric, has nothing to wait for.
while curl -sf "http://127.0.0.1:$PORT/metrics" | grep -Eq '^vllm:num_requests_(running|waiting)\{.*\} [1-9]'; do
  sleep 1
done
sleep "${HOLD_SECONDS:-0}"
