// A long suite: installs NIXL with pip.
import { readdir, stat, truncate } from "node:fs/promises";
import { dirname, join } from "node:path";
import { describePlugins, findLibrary, installNixl } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { describe, expect, onTestFinished, test } from "vitest";
import { downloadWheel } from "../../src/install/download-wheel.js";
import { wheelFor } from "../../src/install/wheels.js";

// Needs a package index. A machine with NIXL installed could reach one.
describe.skipIf(nixlMissing)(`installing NIXL with pip (${nixlMissing ?? "found"})`, () => {
  test("two installations at once in an empty cache give one complete folder and no other files but its selection; force replaces it", async () => {
    const cache = scratchFolder(onTestFinished);
    const environment = { ...process.env, XDG_CACHE_HOME: cache };
    const [one, two] = await Promise.all([
      installNixl({ environment }),
      installNixl({ environment }),
    ]);
    expect(one.library).toBe(two.library);
    const left = await readdir(join(cache, "kv-nixl"));
    expect(left.filter((name) => name !== "selected")).toHaveLength(1);
    expect(
      await findLibrary({ environment: { HOME: cache, PATH: "", XDG_CACHE_HOME: cache } }),
    ).toBe(one.library);
    expect((await installNixl({ environment })).existed).toBe(true);

    const plugin = join(dirname(one.library), "plugins", "libplugin_UCX.so");
    const { size } = await stat(plugin);
    await truncate(plugin, 30_000);
    expect((await installNixl({ environment, force: true })).existed).toBe(false);
    expect((await stat(plugin)).size).toBe(size);
  });

  test("--wheel installs a wheel that was downloaded elsewhere, without Python and without a package index", async () => {
    const folder = scratchFolder(onTestFinished);
    const pinned = wheelFor("1.5.0", 12, process.arch);
    const { path: wheel } = await downloadWheel(
      pinned,
      join(folder, "elsewhere"),
      process.env,
      () => {},
    );
    // No program is on PATH.
    const environment = { HOME: folder, PATH: "" };
    const { library, existed } = await installNixl({ environment, wheel });
    expect(existed).toBe(false);
    expect(await findLibrary({ environment })).toBe(library);
    const [plugin] = await describePlugins({ libraryPath: library, environment, names: ["UCX"] });
    expect(plugin).toMatchObject({ loads: true });
  });
});
