import { spawn, spawnSync } from "node:child_process";
import { once } from "node:events";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { builtProgram } from "@kv/testing/node-programs";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { describe, expect, onTestFinished, test } from "vitest";
import { root } from "../release/packages.js";

const missing =
  spawnSync("systemd-analyze", ["--version"]).status === 0
    ? undefined
    : "systemd-analyze is missing";
const units = readdirSync(join(root, "deploy/systemd"));
const work = scratchFolder();

/** From 0 to 10; systemd calls less than 2 "OK". */
const MAX_EXPOSURE = 2;

describe.skipIf(missing).each(units)(
  `deploy/systemd/%s (${missing ?? "systemd-analyze"})`,
  (unit) => {
    const name = unit.replace(".service", "");
    const text = readFileSync(join(root, "deploy/systemd", unit), "utf8");

    test("systemd finds nothing wrong, and the service can do little", () => {
      const command = `/opt/${name}/node_modules/.bin/${name}`;
      expect(text).toContain(`ExecStart=${command} --config /etc/${name}/config.json\n`);
      // The program of this checkout, since systemd looks whether the file is there.
      const file = join(work, unit);
      const here = text
        .replaceAll(command, `${process.execPath} ${builtProgram(name)}`)
        .replace(/^Documentation=.*\n/m, "");
      writeFileSync(file, here);
      const analyze = (...args: string[]) => {
        const { status, stdout, stderr } = spawnSync("systemd-analyze", args, { encoding: "utf8" });
        return { status, output: `${stdout}${stderr}` };
      };
      expect(analyze("verify", "--man=no", file)).toEqual({ status: 0, output: "" });
      const { output } = analyze("security", "--offline=true", file);
      const exposure = Number(/exposure level for \S+: ([\d.]+)/.exec(output)?.[1]);
      expect(exposure).toBeLessThan(MAX_EXPOSURE);
    });

    test("what it starts serves, reads its settings again at what reloads it, and ends at SIGTERM", async () => {
      const config = join(work, `${name}.json`);
      const settings = { prefillers: ["127.0.0.1:9"], decoders: ["127.0.0.1:9"], port: 0 };
      const write = (limits: object) =>
        writeFileSync(config, JSON.stringify({ ...settings, pairing: { mode: "off" }, limits }));
      write({});
      expect(text).toContain("ExecReload=/bin/kill -HUP $MAINPID\n");
      const child = spawn(process.execPath, [builtProgram(name), "--config", config], {
        stdio: ["ignore", "pipe", "pipe"],
      });
      onTestFinished(() => void child.kill("SIGKILL"));
      let log = "";
      child.stderr.setEncoding("utf8").on("data", (part: string) => (log += part));
      expect(String(await once(child.stdout, "data"))).toMatch(new RegExp(`^${name} ready `));
      write({ bodyLengthBytes: 1000 });
      child.kill("SIGHUP");
      await expect.poll(() => log).toContain('"changed":["limits.bodyLengthBytes"]');
      write({ bodyLength: 1000 });
      child.kill("SIGHUP");
      await expect.poll(() => log).toContain('"event":"not-reloaded"');
      child.kill("SIGTERM");
      expect((await once(child, "exit"))[0]).toBe(0);
    });
  },
);
