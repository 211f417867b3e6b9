// Quizzes: what was chosen first is counted, and kept in this browser alone.
"use strict";
for (const quiz of document.querySelectorAll(".quiz:not(.quiz-live)")) {
  const key = `quiz:${quiz.dataset.quiz}`;
  const questions = [...quiz.querySelectorAll(".quiz-question")];
  let first = {};
  try { first = JSON.parse(localStorage.getItem(key)) ?? {}; } catch { /* nothing is kept */ }
  const keep = () => { try { localStorage.setItem(key, JSON.stringify(first)); } catch { /* forgotten */ } };
  const bar = document.createElement("p");
  bar.className = "quiz-count";
  const count = bar.appendChild(document.createElement("span"));
  count.setAttribute("role", "status");
  const again = bar.appendChild(document.createElement("button"));
  again.type = "button";
  again.textContent = "Begin again";
  quiz.append(bar);
  const tell = () => {
    const chosen = questions.filter((_, i) => i in first).length;
    const right = questions.filter((q, i) => q.querySelectorAll(".quiz-choice")[first[i]]?.dataset.right).length;
    count.textContent = chosen ? `${right} of ${chosen} right at the first try. ` : "Open what you think is right. ";
    again.hidden = !chosen;
  };
  questions.forEach((question, i) => {
    const choices = [...question.querySelectorAll(".quiz-choice")];
    if (choices[first[i]]) choices[first[i]].open = true;
    choices.forEach((choice, j) => {
      choice.addEventListener("toggle", () => {
        if (!choice.open || i in first) return;
        first[i] = j;
        keep();
        tell();
      });
    });
  });
  again.onclick = () => {
    for (const choice of quiz.querySelectorAll(".quiz-choice")) choice.open = false;
    first = {};
    keep();
    tell();
    quiz.querySelector("summary").focus();
  };
  tell();
  quiz.classList.add("quiz-live");
}
