import { systemClock } from "@kv/interface";
import { kubernetesDiscovery } from "../src/kubernetes.js";

/**
 * Child process of `kubernetes-memory.long.test.ts`: prints how many instances it has found, its
 * memory in MiB before and after, and the time in milliseconds.
 */
const [, , kubeconfig = ""] = process.argv;
const memoryMib = () => process.memoryUsage().rss / 2 ** 20;
const discovery = await kubernetesDiscovery({
  kubeconfig,
  podSelector: "app=vllm",
  revisionLabel: "revision",
});
const beforeMib = memoryMib();
const clock = systemClock();
const startedAtMs = clock.now();
const watch = discovery.watch(
  ({ prefillers, decoders }) => {
    const found = prefillers.length + decoders.length;
    process.stdout.write(
      JSON.stringify({
        found,
        beforeMib,
        afterMib: memoryMib(),
        durationMs: clock.now() - startedAtMs,
      }),
    );
    watch.close();
  },
  (error) => process.stderr.write(`${error}\n`),
);
