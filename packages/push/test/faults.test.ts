import { PUSH_FAULT_RULES } from "@kv/testing/faults/fault-rules";
import { describeFaults } from "@kv/testing/faults/fault-suite";
import { pushConnector } from "../src/index.js";

describeFaults("push", {
  connector: pushConnector,
  rules: PUSH_FAULT_RULES,
  atOnce: 0.6,
  // A consumer holds blocks while its prompt is computed, so more of them are in use than with
  // pull.
  numBlocks: 192,
  leastOk: Number(process.env.KV_REQUESTS ?? 1000) < 1000 ? 0.5 : 0.6,
  variants: [
    { name: ", with layer-wise push", options: { layerwise: true, seed: " layers" }, leastOk: 0.6 },
  ],
});
