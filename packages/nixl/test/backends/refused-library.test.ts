import {
  copyFile,
  mkdir,
  mkdtemp,
  readdir,
  readFile,
  realpath,
  rm,
  symlink,
  writeFile,
} from "node:fs/promises";
import { tmpdir } from "node:os";
import { basename, dirname, join } from "node:path";
import { KvError } from "@kv/interface";
import { doctor, findLibrary, nixlTransport } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { afterAll, beforeAll, describe, expect, test } from "vitest";

// A system without OpenSSL 3: a copy of NIXL whose gRPC needs libssl.so.9 instead, which no system
// has.
describe.skipIf(nixlMissing)(
  `NIXL on a system without OpenSSL 3 (${nixlMissing ?? "found"})`,
  () => {
    let folder = "";
    let library = "";

    beforeAll(async () => {
      folder = await mkdtemp(join(tmpdir(), "kv-nixl-openssl-"));
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
      const bundled = (await readdir(folder)).find(
        (name) => name.endsWith("libs") && !name.startsWith("."),
      );
      const names = await readdir(join(folder, bundled ?? ""));
      const grpc = join(
        folder,
        bundled ?? "",
        names.find((name) => name.startsWith("libgrpc-")) ?? "",
      );
      await replace(grpc, async (from) => {
        const text = (await readFile(from))
          .toString("latin1")
          .replaceAll("libssl.so.3", "libssl.so.9");
        await writeFile(grpc, text, "latin1");
      });
    });
    afterAll(() => rm(folder, { recursive: true, force: true }));

    /** Replaces a link by a file, which `write` makes from the link's target. */
    async function replace(link: string, write: (from: string) => Promise<void>): Promise<void> {
      const from = await realpath(link);
      await rm(link);
      await write(from);
    }

    test("the first agent fails with the library that is missing, and how to get it", async () => {
      await using transport = nixlTransport({ library });
      const error: unknown = await transport.createAgent().catch((caught: unknown) => caught);
      expect(KvError.is(error, "KV_LIBRARY_INCOMPATIBLE")).toBe(true);
      const { message, hint } = error as KvError;
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
