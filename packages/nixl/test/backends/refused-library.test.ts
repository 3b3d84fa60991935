import {
  copyFile,
  mkdir,
  readdir,
  readFile,
  realpath,
  rm,
  symlink,
  writeFile,
} from "node:fs/promises";
import { basename, dirname, join } from "node:path";
import { doctor, findLibrary, nixlTransport } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, describe, expect, test } from "vitest";
import { refused } from "../support/refused.js";

// A system without OpenSSL 3: a copy of NIXL whose gRPC needs libssl.so.9 instead, which no system
// has.
describe.skipIf(nixlMissing)(
  `NIXL on a system without OpenSSL 3 (${nixlMissing ?? "found"})`,
  () => {
    const folder = scratchFolder();
    let library = "";

    beforeAll(async () => {
      const original = await realpath(await findLibrary());
      const installation = dirname(dirname(original));
      for (const place of await readdir(installation)) {
        await mkdir(join(folder, place));
        for (const name of await readdir(join(installation, place))) {
          await symlink(join(installation, place, name), join(folder, place, name));
        }
      }
      library = join(folder, basename(dirname(original)), basename(original));
      await replace(library, (from) => copyFile(from, library));
      const grpc = (await readdir(folder, { recursive: true })).find((name) =>
        /^[^.].*libs\/libgrpc-/.test(name),
      );
      const file = join(folder, grpc ?? "");
      await replace(file, async (from) => {
        const text = await readFile(from, "latin1");
        await writeFile(file, text.replaceAll("libssl.so.3", "libssl.so.9"), "latin1");
      });
    });

    /** Replaces a link by a file, which `write` makes from the link's target. */
    async function replace(link: string, write: (from: string) => Promise<void>): Promise<void> {
      const from = await realpath(link);
      await rm(link);
      await write(from);
    }

    test("the first agent fails with the library that is missing, and how to get it", async () => {
      await using transport = nixlTransport({ library });
      const { message, hint } = await refused(transport.createAgent(), "KV_LIBRARY_INCOMPATIBLE");
      expect(message).toContain(`${library} lacks libssl.so.9`);
      expect(hint).toContain("apt-get install libssl3");
    });

    test("the doctor reports the same", { timeout: 60_000 }, async () => {
      const { checks } = await doctor({ library, pair: false });
      expect(checks.find(({ id }) => id === "library.path")).toMatchObject({
        status: "fail",
        found: expect.stringContaining("libssl.so.9"),
        fix: expect.stringContaining("apt-get install libssl3"),
      });
    });
  },
);
