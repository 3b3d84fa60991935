import { spawn } from "node:child_process";
import { existsSync } from "node:fs";
import { mkdir, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { isLongRun } from "@kv/testing/long-run";
import { builtProgram } from "@kv/testing/node-programs";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { describe, expect, test } from "vitest";
import { type Check, type DoctorReport, doctor, doctorText } from "../src/index.js";

const native = (name: string) =>
  fileURLToPath(new URL(`../../../native/build/${name}`, import.meta.url));
const libraryPath = native("libfake_nrt.so");
const absent = process.platform !== "linux" || !existsSync(libraryPath);
const root = scratchFolder();

const byId = ({ checks }: DoctorReport) =>
  Object.fromEntries(checks.map((check) => [check.id, check])) as Record<string, Check>;

/** A machine's files. */
async function machine(name: string, files: Readonly<Record<string, string>>): Promise<string> {
  for (const [path, text] of Object.entries(files)) {
    await mkdir(dirname(join(root, name, path)), { recursive: true });
    await writeFile(join(root, name, path), text);
  }
  return join(root, name);
}

const surroundings = (more: Readonly<Record<string, string>> = {}) => ({
  ...process.env,
  KV_NRT_LIBRARY: libraryPath,
  ...more,
});

const HUNG_MS = isLongRun ? 15_000 : 3000;
const SLOW_MACHINE_MS = 900_000;

describe.skipIf(absent)(
  absent ? "doctor: libnrt's stand-in is not built (node native/build.mjs)" : "doctor",
  () => {
    test(
      "a complete instance: no check fails, and each reports its finding",
      async () => {
        const whole = await machine("whole", {
          "dev/neuron0": "",
          "dev/neuron1": "",
          "sys/module/neuron/version": "2.24.7.0\n",
          "sys/module/efa/version": "2.17.2g\n",
          "sys/class/infiniband/rdmap16s27": "",
          "opt/amazon/efa/lib64/libfabric.so.1": "",
          "proc/self/limits":
            "Max locked memory         unlimited            unlimited            bytes\n",
        });
        const report = await doctor({
          root: whole,
          env: surroundings({ NEURON_RT_VISIBLE_CORES: "0-3" }),
        });
        const checks = byId(report);
        expect(report.counts.fail).toBe(0);
        expect(checks["machine.devices"]).toMatchObject({
          status: "ok",
          found: "/dev/neuron0, /dev/neuron1",
        });
        expect(checks["machine.driver"]?.found).toContain("2.24.7.0");
        expect(checks["machine.cores"]?.found).toBe("NEURON_RT_VISIBLE_CORES=0-3");
        expect(checks["library.path"]).toMatchObject({
          status: "ok",
          details: { path: libraryPath },
        });
        expect(checks["library.symbols"]).toMatchObject({
          status: "ok",
          found: "8 of 8 required functions",
        });
        expect(checks["library.batch"]?.status).toBe("ok");
        expect(checks["runtime.init"]).toMatchObject({
          status: "ok",
          found: expect.stringContaining("4096 bytes written and read back"),
        });
        expect(checks["runtime.tried"]?.status).toBe("warn");
        expect(checks["network.efa"]?.found).toBe("rdmap16s27, driver 2.17.2g");
        expect(checks["network.libfabric"]?.status).toBe("ok");
        expect(checks["network.memlock"]?.status).toBe("ok");
        const text = doctorText(report);
        for (const { title } of report.checks) expect(text).toContain(title);
        expect(text).toMatch(/\n\nwarn: it works; 1 of \d+ checks/);
      },
      SLOW_MACHINE_MS,
    );

    test(
      "a bare machine: each missing part fails with its fix, and nothing else is tried",
      async () => {
        const report = await doctor({
          root: await machine("bare", { "proc/self/limits": "" }),
          env: { ...process.env, KV_NRT_LIBRARY: "/nowhere/libnrt.so.1" },
        });
        const checks = byId(report);
        expect(report.verdict).toBe("fail");
        for (const id of ["machine.devices", "machine.driver", "library.path"]) {
          expect(checks[id]?.status, id).toBe("fail");
          expect(checks[id]?.fix, id).toContain("aws-neuronx");
        }
        expect(checks["library.path"]?.found).toContain("tried /nowhere/libnrt.so.1: no such file");
        expect(checks["library.symbols"]).toBeUndefined();
        expect(checks["runtime.init"]).toMatchObject({
          status: "note",
          found: expect.stringMatching(/^not tried/),
        });
        expect(checks["network.efa"]).toMatchObject({
          status: "warn",
          fix: expect.stringContaining("UCX"),
        });
      },
      SLOW_MACHINE_MS,
    );

    test(
      "another library lacks all functions",
      async () => {
        const env = { ...process.env, KV_NRT_LIBRARY: native("libfake_nixl_capi.so") };
        const checks = byId(await doctor({ root, env }));
        expect(checks["library.symbols"]).toMatchObject({
          status: "fail",
          found: expect.stringContaining("nrt_init, nrt_close"),
        });
        expect(checks["library.batch"]?.status).toBe("warn");
        expect(checks["runtime.init"]?.status).toBe("note");
      },
      SLOW_MACHINE_MS,
    );

    test.each([
      ["nrt_init", "nrt_init answered NRT_STATUS 1"],
      ["nrt_tensor_allocate", "answered NRT_STATUS 4"],
      ["nrt_tensor_read", "nrt_tensor_read answered NRT_STATUS 1"],
      ["nrt_init crashes", "the process ended with SIGABRT, in nrt_init"],
    ])(
      "a runtime that fails in %s is one failed check of the report",
      async (fault, found) => {
        const checks = byId(await doctor({ root, env: surroundings({ KV_FAKE_NRT_FAIL: fault }) }));
        expect(checks["library.path"]?.status).toBe("ok");
        expect(checks["runtime.init"]?.status).toBe("fail");
        expect(checks["runtime.init"]?.found).toMatch(found);
        expect(checks["runtime.init"]?.fix).toBeDefined();
      },
      SLOW_MACHINE_MS,
    );

    test(
      "the command prints one JSON object and exits with 1 when a check fails",
      async () => {
        const run = async (args: readonly string[], fault: string) => {
          const child = spawn(process.execPath, [builtProgram("kv-neuron"), "doctor", ...args], {
            env: surroundings({ KV_FAKE_NRT_FAIL: fault }) as NodeJS.ProcessEnv,
            stdio: ["ignore", "pipe", "inherit"],
          });
          let stdout = "";
          child.stdout.setEncoding("utf8").on("data", (chunk: string) => {
            stdout += chunk;
          });
          const code = await new Promise((resolve) => child.once("close", resolve));
          return { code, stdout };
        };
        // A runtime that hangs is killed. A busy machine needs seconds to come to it.
        const hung = await run(["--json", "--timeout", `${HUNG_MS}`], "nrt_init hangs");
        const report = JSON.parse(hung.stdout) as DoctorReport;
        expect(byId(report)["runtime.init"]?.found).toBe(
          `no answer within ${HUNG_MS / 1000} s, in nrt_init`,
        );
        expect(hung.code).toBe(1);
        const { stdout } = await run(["--no-init"], "");
        expect(stdout).toMatch(/^ok +libnrt\.so +\S*libfake_nrt\.so$/m);
        expect(stdout).toContain("not tried (--no-init");
      },
      SLOW_MACHINE_MS,
    );
  },
);
