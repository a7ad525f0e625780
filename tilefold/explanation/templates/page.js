// Pointing at a name marks it in every column of the same kernel; columns scroll together.
document.querySelectorAll(".tilefold .codes").forEach((codes) => {
  const mark = (name, on) =>
    codes.querySelectorAll(`i[data-n="${CSS.escape(name)}"]`).forEach((i) => i.classList.toggle("hot", on));
  for (const [event, on] of [["mouseover", true], ["mouseout", false]])
    codes.addEventListener(event, (e) => {
      const i = e.target.closest("i[data-n]");
      if (i) mark(i.dataset.n, on);
    });
  const columns = [...codes.querySelectorAll("pre")];
  let leader = null;
  columns.forEach((pre) => {
    pre.addEventListener("pointerenter", () => (leader = pre));
    pre.addEventListener("scroll", () => {
      if (pre !== leader) return;
      const share = pre.scrollTop / Math.max(1, pre.scrollHeight - pre.clientHeight);
      for (const other of columns)
        if (other !== pre) other.scrollTop = share * (other.scrollHeight - other.clientHeight);
    });
  });
});
// A drawing larger than its frame: the whole of it first; a click (or Enter) shows that place in full size, and back.
document.querySelectorAll(".tilefold .flows .canvas").forEach((canvas) => {
  const svg = canvas.querySelector("svg");
  if (canvas.scrollWidth <= canvas.clientWidth + 1 && canvas.scrollHeight <= canvas.clientHeight + 1) return;
  canvas.classList.add("zooms", "whole");
  canvas.tabIndex = 0;
  canvas.parentElement.querySelector("figcaption").append(" (click to zoom)");
  const toggle = (x, y) => {
    if (canvas.classList.toggle("whole")) return;
    canvas.scrollLeft = x * svg.clientWidth - canvas.clientWidth / 2;
    canvas.scrollTop = y * svg.clientHeight - canvas.clientHeight / 2;
  };
  canvas.addEventListener("click", (e) => {
    const at = svg.getBoundingClientRect();
    toggle((e.clientX - at.left) / at.width, (e.clientY - at.top) / at.height);
  });
  canvas.addEventListener("keydown", (e) => e.key === "Enter" && toggle(0.5, 0));
});
// Steps of the rules: the chosen state beside the one before it.
document.querySelectorAll(".tilefold .rule-steps").forEach((steps) => {
  const range = steps.querySelector("input[type=range]");
  const shown = steps.querySelector("output");
  const states = [...steps.querySelectorAll(".state")];
  const show = () => {
    const at = Number(range.value);
    states.forEach((s, k) => (s.hidden = k !== at && k !== at - 1));
    shown.textContent = `${at} of ${steps.dataset.last}`;
  };
  range.addEventListener("input", show);
  steps.querySelectorAll("button[data-move]").forEach((b) =>
    b.addEventListener("click", () => {
      range.value = String(Number(range.value) + Number(b.dataset.move));
      show();
    }));
  show();
});
