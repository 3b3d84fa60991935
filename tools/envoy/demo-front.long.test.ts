// A long suite: the demo with Envoy in front.
import { isLongRun } from "@kv/testing/long-run";
import { describe, expect, test } from "vitest";
import { nixlAbsence } from "../../apps/demo/test/support/nixl-absence.js";
import { ended, startDemo } from "../../apps/demo/test/support/run-demo.js";
import { envoyMissing } from "./support/envoy-missing.js";

const FRONT = ["--front", "envoy", "--requests", "2", "--max-tokens", "4"];
const answers = (url: string) =>
  fetch(`${url}/v1/models`).then(
    () => true,
    () => false,
  );

describe.skipIf(envoyMissing !== undefined)(
  `the demo with Envoy in front (${envoyMissing ?? "found"})`,
  () => {
    test("in one process, pull: every token is checked, and Envoy ends with the run", async () => {
      const { code, stdout, stderr } = await ended(
        startDemo(["--transport", "memory", "--json", ...FRONT]),
      );
      expect(JSON.parse(stdout)).toMatchObject({
        ok: true,
        front: "envoy",
        requests: [{ tokens_equal: true }, { tokens_equal: true }],
      });
      const [, url = ""] = /through (http:\S+)/.exec(stderr) ?? [];
      expect(url).not.toBe("");
      expect(await answers(url)).toBe(false);
      expect(code).toBe(0);
    });
  },
);

const absence = await nixlAbsence();
const why = absence ?? envoyMissing;

describe.skipIf(why !== undefined)(
  `the demo's processes with Envoy in front (${why ?? "found"})`,
  () => {
    test.runIf(isLongRun)(
      "push over NIXL: the tokens are right, and Envoy ends when the demo is killed",
      async () => {
        const demo = startDemo([
          "--transport",
          "nixl",
          "--connector",
          "push",
          "--keep",
          "--json",
          ...FRONT,
        ]);
        const output = { stdout: "", stderr: "" };
        demo.stdout?.on("data", (piece) => (output.stdout += piece));
        demo.stderr?.on("data", (piece) => (output.stderr += piece));
        await expect
          .poll(() => output.stderr, { timeout: 150_000 })
          .toContain("curl http://127.0.0.1:");
        expect(JSON.parse(output.stdout)).toMatchObject({
          ok: true,
          front: "envoy",
          transport: "nixl",
        });
        const [, url = ""] = /Envoy keeps running at (http:[^;]+);/.exec(output.stderr) ?? [];
        expect(await answers(url)).toBe(true);
        demo.kill("SIGKILL");
        await expect.poll(() => answers(url)).toBe(false);
      },
      180_000,
    );
  },
);
