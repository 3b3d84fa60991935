// A long suite: staging over NIXL; neuron-memory.test.ts has it over the memory transport.
import { describe, expect, it } from "vitest";
import { libfabricAbsence } from "./support/libfabric-absence.js";
import { nixlAbsence } from "./support/nixl-absence.js";
import { ended, startDemo } from "./support/run-demo.js";

const absence = await nixlAbsence();
const noLibfabric = await libfabricAbsence();
const SLOW_MACHINE_MS = 400_000;
const because = (why: string | undefined) => (why === undefined ? "" : ` (${why})`);

interface Report {
  readonly ok: boolean;
  readonly requests: readonly Readonly<Record<string, number>>[];
}

async function report(args: readonly string[]): Promise<Report> {
  const { code, stdout, stderr } = await ended(startDemo([...args, "--json", "--requests", "2"]));
  expect(code, stderr).toBe(0);
  return JSON.parse(stdout) as Report;
}

describe.skipIf(noLibfabric !== undefined)(
  `the configuration of vllm-neuron's issue 26, on a simulated device${because(noLibfabric)}`,
  () => {
    it(
      "prints the time of every phase, for 30 tokens",
      async () => {
        const { code, stdout, stderr } = await ended(
          startDemo(["--prefill-platform", "neuron", "--backend", "LIBFABRIC", "--requests", "1"]),
        );
        expect(stdout, stderr).toMatch(
          /backend LIBFABRIC\n\n.*\nprompt +TTFT +queue +prefill +save .* transfer +load .* decode .* KV tokens\n.* equal +equal\n/,
        );
        expect(stderr).toMatch(
          /1 prefill \(TP 1, block 16, neuron, simulated\), 1 decode \(TP 1, block 16\)/,
        );
        expect(code).toBe(0);
      },
      SLOW_MACHINE_MS,
    );
  },
);

describe.skipIf(absence !== undefined)(
  `a simulated Neuron device over NIXL${because(absence)}`,
  () => {
    it(
      "at decode, with different TP and block sizes",
      async () => {
        const { ok, requests } = await report([
          "--decode-platform",
          "neuron",
          "--transport",
          "nixl",
          "--prefill-tp",
          "2",
          "--decode-block-size",
          "32",
        ]);
        expect(ok).toBe(true);
        for (const request of requests) {
          expect(request).toMatchObject({ output_tokens: 30, save_ms: 0 });
          expect(request.load_ms).toBeGreaterThan(0);
        }
      },
      SLOW_MACHINE_MS,
    );

    it(
      "at prefill and decode, with push",
      async () => {
        const { ok, requests } = await report([
          "--prefill-platform",
          "neuron",
          "--decode-platform",
          "neuron",
          "--transport",
          "nixl",
          "--connector",
          "push",
        ]);
        expect(ok).toBe(true);
        for (const request of requests) {
          for (const time of [
            "prefill_ms",
            "save_ms",
            "transfer_ms",
            "load_ms",
            "decode_ms",
            "total_ms",
          ])
            expect(request[time], time).toBeGreaterThan(0);
          expect(request.transfer_bytes).toBeGreaterThan(0);
        }
      },
      SLOW_MACHINE_MS,
    );
  },
);
