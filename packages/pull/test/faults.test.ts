import { describeFaults } from "@kv/testing/faults/fault-suite";

describeFaults("pull", {
  leastOk: 0.6,
  variants: [
    {
      name: ", with producers that speak only vLLM's protocol",
      options: { plainProducers: true },
      leastOk: 0.15,
    },
  ],
});
