import { rmSync } from "node:fs";
import { resolve } from "node:path";
import { parseArgs } from "node:util";
import { root } from "../release/packages.js";
import { packForInstall } from "./install.js";

// tools/pack/pack.mjs starts this after the set-up.
const known = { out: { type: "string" } } as const;
const { values, tokens } = parseArgs({ options: known, strict: false, tokens: true });
const line = tokens.flatMap((token) => {
  if (token.kind === "positional") return [token.value];
  return token.kind === "option" && token.name !== "out" ? [token.rawName] : [];
});
const own = resolve(root, "build/tarballs");
const out =
  values.out === undefined ? own : resolve(process.env["INIT_CWD"] ?? "", String(values.out));
try {
  if (out === own) rmSync(own, { recursive: true, force: true });
  const install = await packForInstall(line, out, (text) => process.stderr.write(`${text}\n`));
  process.stdout.write(`${install}\n`);
} catch (error) {
  process.stderr.write(`pack: ${(error as Error).message}\n`);
  process.exitCode = 2;
}
