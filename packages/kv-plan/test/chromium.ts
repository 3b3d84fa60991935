import { existsSync } from "node:fs";
import { type Browser, launch, type Page } from "puppeteer-core";
import { expect, test } from "vitest";

// The browser that a reader has. A distribution's own is used: apt-get install chromium.
const candidates = [
  process.env["KV_CHROMIUM"],
  "/usr/bin/chromium",
  "/usr/bin/chromium-browser",
  "/usr/bin/google-chrome",
];

/** The path of the browser; undefined where there is none. */
export const chromium = candidates.find((path) => path !== undefined && existsSync(path));

if (chromium === undefined && process.env["CI"] === "true") {
  test("Chromium is there", () =>
    expect.fail(
      `CI needs one of ${candidates.filter(Boolean).join(", ")}: apt-get install chromium`,
    ));
}

/** Starts the browser, which the caller closes. */
export function openBrowser(): Promise<Browser> {
  return launch({
    executablePath: chromium ?? "",
    args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
    timeout: 120_000,
  });
}

/**
 * Opens a page. What it logs as an error or throws, and what it asks of a network, is added to
 * `complaints`.
 */
export async function openPage(browser: Browser, complaints: string[]): Promise<Page> {
  const page = await browser.newPage();
  page.on("pageerror", (error) => complaints.push(String(error)));
  page.on("console", (message) => {
    if (message.type() === "error") complaints.push(message.text());
  });
  page.on("request", (request) => {
    if (!/^(file|blob):/.test(request.url())) complaints.push(`it asked for ${request.url()}`);
  });
  return page;
}
