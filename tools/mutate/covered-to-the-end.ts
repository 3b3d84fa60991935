import { afterEach, beforeEach } from "vitest";

// Stryker counts what runs in `onTestFinished` as covered by no test: its own `afterEach` comes
// before. There the tests look for what is left.
const coverage = () =>
  (globalThis as { __stryker__?: { currentTestId?: string | undefined } }).__stryker__ ?? {};

// The hooks run in reverse order, so this is the last one.
beforeEach(({ onTestFinished }) => {
  onTestFinished(() => {
    coverage().currentTestId = undefined;
  });
});

// And this is the first one.
afterEach(({ onTestFinished }) => {
  const { currentTestId } = coverage();
  onTestFinished(() => {
    coverage().currentTestId = currentTestId;
  });
});
