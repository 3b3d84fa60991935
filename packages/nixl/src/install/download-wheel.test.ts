import { chmodSync, writeFileSync } from "node:fs";
import { delimiter, join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, onTestFinished, test } from "vitest";
import { downloadWheel } from "./download-wheel.js";
import { wheelFor } from "./wheels.js";

test("first-contact.md 8: the file that pip copies before it removes it is counted once", async () => {
  const folder = scratchFolder(onTestFinished);
  const python = join(folder, "python3");
  const lines = [
    "#!/bin/sh",
    'head -c 3000000 /dev/zero > "$TMPDIR/one.whl"',
    'mkdir "$TMPDIR/two" && cp "$TMPDIR/one.whl" "$TMPDIR/two/"',
    "sleep 3",
    "exit 1",
  ];
  writeFileSync(python, lines.join("\n"));
  chmodSync(python, 0o755);
  const shown: string[] = [];
  const environment = { PATH: `${folder}${delimiter}${process.env.PATH}` };
  const wheel = wheelFor("1.5.0", 12, "x64");
  const downloaded = downloadWheel(wheel, join(folder, "w"), environment, (line) => {
    shown.push(line);
  });
  await expect(downloaded).rejects.toMatchObject({ code: "KV_INSTALL_FAILED" });
  expect(shown).toEqual(["3 MB so far"]);
});
