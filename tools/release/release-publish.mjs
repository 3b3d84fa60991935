// node tools/release/release-publish.mjs FOLDER [NPM-FLAG …]: publishes the tarballs that
// FOLDER/order.json lists, in its order, each after the packages that it depends on. A version that
// the registry has already is skipped, so that a publish that was interrupted can be repeated.
// Nothing is published when a file is not the one that FOLDER/provenance.json lists.
import { spawnSync } from "node:child_process";
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { resolve } from "node:path";

const [folder, ...flags] = process.argv.slice(2);
if (folder === undefined) {
  console.error(
    "release-publish: usage: node tools/release/release-publish.mjs FOLDER [NPM-FLAG …]",
  );
  process.exit(2);
}

const config = flags.filter((flag) => flag.startsWith("--userconfig"));

/** Whether the registry has the version. Throws when it cannot be asked. */
function isPublished(specifier) {
  const { status, stdout, stderr } = spawnSync(
    "npm",
    ["view", specifier, "version", "--json", ...config],
    {
      encoding: "utf8",
    },
  );
  if (status === 0) return stdout.trim() !== "";
  if (`${stdout}${stderr}`.includes("E404")) return false;
  throw new Error(`npm view ${specifier} ended with ${status}\n${stderr}`);
}

const readJson = (name) => JSON.parse(readFileSync(resolve(folder, name), "utf8"));
const order = readJson("order.json");
const { subject } = readJson("provenance.json");
const listed = new Map(subject.map(({ name, digest }) => [name, digest.sha256]));
for (const name of [...listed.keys(), ...order.map(({ file }) => file)]) {
  const sha256 = createHash("sha256")
    .update(readFileSync(resolve(folder, name)))
    .digest("hex");
  if (listed.get(name) !== sha256)
    throw new Error(`${name} has SHA-256 ${sha256}, and provenance.json lists ${listed.get(name)}`);
}

for (const { name, version, file } of order) {
  if (isPublished(`${name}@${version}`)) {
    console.log(`${name}@${version} is published already`);
    continue;
  }
  const args = ["publish", resolve(folder, file), "--access", "public", ...flags];
  const { status, stdout, stderr } = spawnSync("npm", args, { encoding: "utf8" });
  if (status !== 0)
    throw new Error(`npm ${args.join(" ")} ended with ${status}\n${stdout}${stderr}`);
  console.log(`${name}@${version} published`);
}
